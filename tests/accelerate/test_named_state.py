"""State that a snapshot of an accelerator cannot hold is named, and trainings of one process are kept apart."""

from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("hooked.py"))


@pytest.mark.parametrize(
    ("way", "expected", "unexpected"),
    [
        ("hooks", "save_average): what only these hooks save", "Traceback"),
        ("batch_size", "starting fresh: free_memory() ended the training", "StateError"),
        ("notebook", "newest: step 8", "training failed"),
    ],
)
def test_a_script_sees_what_its_snapshots_hold(zygote, tmp_path, way, expected, unexpected):
    status = zygote.run([SCRIPT, way, str(tmp_path / "run")], {}, tmp_path / "output")
    text = (tmp_path / "output").read_text()
    assert status == 0, text
    assert expected in text
    assert unexpected not in text
    assert "hooks" not in text or way == "hooks"
