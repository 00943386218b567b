"""A directory beside a checkpoint is removed when its writer is dead, and only then."""

import subprocess
import sys
from pathlib import Path

from lazysnap.export.folder import adopt, side_directory, sweep

PROGRAM = """
import sys
from lazysnap.export.folder import side_directory
print(side_directory(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    place = str(tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        own = Path(side_directory(place))
        assert theirs.is_dir()
        other.kill()
    sweep(str(tmp_path), "out")
    assert own.is_dir()
    assert not theirs.exists()


def test_a_directory_that_was_adopted_outlives_its_maker(tmp_path):
    place = str(tmp_path / "out")
    made = subprocess.run([sys.executable, "-c", PROGRAM, place], input="", capture_output=True, text=True, check=True)
    theirs = made.stdout.strip()
    adopt(theirs)
    sweep(str(tmp_path), "out")
    assert Path(theirs).is_dir()
