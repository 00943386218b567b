"""Killed between the capture of a directory's snapshot and its storage: what the directory then means is exact."""

from pathlib import Path

import pytest
from named import digest
from test_directories import Script

PROGRAM = str(Path(__file__).with_name("named.py"))


@pytest.mark.parametrize(("before", "victims"), [("nothing", "trainer"), ("nothing", "both"), ("checkpoint", "both")])
def test_what_was_named_is_loaded_or_what_stock_has(zygote, forking_python, tmp_path, before, victims):
    environment = {"LAZYSNAP_TEST_PYTHON": forking_python}
    assert zygote.run([PROGRAM, str(tmp_path), before, victims], environment, tmp_path / "output") == -9, (
        tmp_path / "output"
    ).read_text()

    again = Script(tmp_path)
    if victims == "both" and before == "nothing":
        with pytest.raises(FileNotFoundError):
            again.accelerator.load_state(tmp_path / "named")
    else:
        found = again.accelerator.load_state(tmp_path / "named")
        step = 2 if victims == "trainer" else 1
        assert (found is None) == (victims == "both")
        assert digest(again) == (tmp_path / f"facts-{step}").read_text()
    again.accelerator.end_training()
