"""A training of its own process, for tests that kill it: ``killed.py DIRECTORY STEP``.

It dies at the start of the batch behind STEP, whose capture is whole then.
"""

import os
import signal
import sys
import warnings

warnings.simplefilter("ignore")

from lightning.pytorch.callbacks import Callback  # noqa: E402
from test_callback import fit  # noqa: E402

from lazysnap import LazySnapshotCallback  # noqa: E402


class Killed(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            (lazy,) = (found for found in trainer.callbacks if isinstance(found, LazySnapshotCallback))
            assert lazy.engine.wait(self.step, until="captured", timeout_s=60)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, step = sys.argv[1:]
    fit(directory, Killed(int(step)))


if __name__ == "__main__":
    main()
