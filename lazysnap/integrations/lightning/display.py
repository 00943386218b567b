"""The display of snapshots during a fit: figures in the trainer's loggers, and a bar while the last one is stored."""

import logging
from contextlib import AbstractContextManager
from typing import Any

from rich.progress import BarColumn

from lazysnap.integrations.progress_bar import Show, rich_bar, tqdm_bar
from lazysnap.integrations.session import Session

logger = logging.getLogger(__name__)


class Loggers:
    """The loggers of one fit; one that raises is named once, and gets no more."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._failed: set[int] = set()

    def log(self, session: Session, since: int) -> None:
        """Hand them the figures, every ``log_every_n_steps``, on rank 0; ``since``: the step before this one.

        Before the step is captured: what a logger draws from random generators belongs to it.
        """
        trainer, every = self._trainer, self._trainer.log_every_n_steps
        is_due = trainer.is_global_zero and every and session.step // every != since // every
        values = session.figures() if is_due else {}
        for one in trainer.loggers if values else ():
            if id(one) not in self._failed:
                try:
                    one.log_metrics(metrics=dict(values), step=session.step)
                    one.save()
                except Exception as error:  # noqa: BLE001  figures are not worth a training
                    self._failed.add(id(one))
                    name, kind = type(one).__name__, type(error).__name__
                    logger.warning("%s takes no figures of snapshots: %s: %s", name, kind, error)


def bar_of(trainer: Any) -> AbstractContextManager[Show]:
    """Return the bar for the end of a fit: one that looks as the trainer's own, if it shows one."""
    own = trainer.progress_bar_callback
    if own is not None and not own.is_disabled and hasattr(own, "init_train_tqdm"):
        return tqdm_bar(own.init_train_tqdm())
    if own is not None and not own.is_disabled and hasattr(own, "theme"):
        own.progress.stop()  # one that is still live, and a second one, hinder each other
        theme = own.theme
        column = BarColumn(complete_style=theme.progress_bar, finished_style=theme.progress_bar_finished)
        return rich_bar(own._console, column)
    return rich_bar()
