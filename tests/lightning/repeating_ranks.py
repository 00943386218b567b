"""A fit of two ranks with DDP, which starts the second itself: ``repeating_ranks.py DIRECTORY [BAD_RANK BAD_STEP]``.

On BAD_RANK the loss is NaN once, at BAD_STEP. Each rank writes what it trained and how it ended to DIRECTORY/RANK.
"""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from harness import BATCH_SIZE, Net, Numbers  # noqa: E402
from support.bits import digest, rng_digest  # noqa: E402
from test_callback import Ready, make_trainer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lazysnap import LazySnapshotCallback, NonFinite  # noqa: E402


class Spoilt(Net):
    def __init__(self, bad):
        super().__init__()
        self.bad, self.seen = bad, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if [self.global_rank, self.global_step] == self.bad:
            self.bad, loss = None, loss * float("nan")
        self.seen.append([self.current_epoch, self.global_step, batch[0].tolist(), float(loss).hex()])
        return loss


def main():
    directory, bad = Path(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    lazy = LazySnapshotCallback(rollback_on=NonFinite(data="repeat"))
    module = Spoilt(bad)
    trainer = make_trainer(directory, lazy, Ready(lazy), strategy="ddp", devices=2, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(Numbers(48), BATCH_SIZE, shuffle=True), DataLoader(Numbers(8), 4))
    state = [module.state_dict(), [one.state_dict() for one in trainer.optimizers]]
    ended = [digest(state), rng_digest(), trainer.global_step, repr(trainer.fit_loop.state_dict())]
    told = {"seen": module.seen, "ended": ended, "rollbacks": lazy.statistics().rollbacks}
    (directory / str(trainer.global_rank)).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
