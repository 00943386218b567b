"""A training that dies as soon as ``save_state(directory)`` has returned: ``named.py ROOT BEFORE VICTIMS``.

BEFORE: ``checkpoint``, if the directory has one of step 1 by then. VICTIMS: ``trainer``, or ``both`` with its keeper.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

from fillers import TIMEOUT_S
from test_directories import Script


def digest(script: Script) -> str:
    """What a restart must bring back."""
    return hashlib.sha256(repr(script.facts()).encode()).hexdigest()


def main(root: Path, before: str, victims: str) -> None:
    script = Script(root, max_bytes_per_s=50_000)
    script.train()
    (root / "facts-1").write_text(digest(script))
    if before == "checkpoint":
        script.accelerator.save_state(root / "named")
        assert script.accelerator.wait_for_checkpoints(TIMEOUT_S)
    script.train()
    (root / "facts-2").write_text(digest(script))
    script.accelerator.save_state(root / "named")
    engine = script.accelerator.engine
    assert engine.wait(2, until="captured", timeout_s=TIMEOUT_S)
    if victims == "both":
        os.kill(engine._client.keeper_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.executable = os.environ["LAZYSNAP_TEST_PYTHON"]
    main(Path(sys.argv[1]), *sys.argv[2:])
