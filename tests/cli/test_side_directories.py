"""A directory beside a checkpoint is removed when its writer is dead, and only then."""

import subprocess
import sys
from pathlib import Path

from lazysnap.exports.folder import in_place_when_whole, sweep

PROGRAM = """
import sys
from lazysnap.exports.folder import in_place_when_whole
with in_place_when_whole(sys.argv[1], {}) as place:
    print(place, flush=True)
    sys.stdin.read()
"""


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    place = str(tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        with in_place_when_whole(place, {}) as own:
            assert theirs.is_dir()
            other.kill()
            other.wait()
            sweep(str(tmp_path), "out")
            assert Path(own).is_dir()
            assert not theirs.exists()
