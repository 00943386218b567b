"""A cell of a notebook that is run again: the process goes on where its earlier, failed run was."""

import json
from pathlib import Path

import pytest
from support.newest import PROVES

CELLS = Path(__file__).with_name("cells.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "accelerate", "transformers", "lightning"])
def test_a_cell_that_is_run_again_goes_on_exactly_and_the_engine_before_says_that_it_was_replaced(
    zygote, tmp_path, kind
):
    output = tmp_path / "output"
    assert zygote.run([str(CELLS), str(tmp_path / "run"), kind], PROVES, output) == 0, output.read_text()

    result = json.loads(output.read_text().splitlines()[-1])
    first, second, third = result["begun"]
    assert first == 1 < second < third
    assert result["resumed"] == result["undisturbed"]
    if kind == "loop":
        assert result["error"].startswith("ConfigError: boundary: another SnapshotEngine of this process")
