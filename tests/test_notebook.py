"""The notebook among the examples runs, from an empty directory."""

import json
import os
import pathlib
import subprocess

import pytest
from support.newest import PROVES

NOTEBOOK = pathlib.Path(__file__).parents[1] / "examples" / "first_steps.ipynb"


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_one_after_the_other(forking_python, tmp_path):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "outputs of one machine are not kept"
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in cells))

    how = {"cwd": tmp_path, "env": {**os.environ, **PROVES}, "capture_output": True, "text": True, "timeout": 600}
    run = subprocess.run([forking_python, program], **how)

    assert run.returncode == 0, run.stdout + run.stderr
    assert "ended by signal 9" in run.stdout
    assert "from memory: captured" in run.stdout
    assert "TrainerEnded" in run.stdout
    assert "a restart resumes" in run.stdout
