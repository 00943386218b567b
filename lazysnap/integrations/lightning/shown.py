"""What a fit shows of its snapshots: figures in the trainer's loggers, and a bar while the last one is stored."""

import logging
from typing import Any

from rich.progress import BarColumn

from lazysnap.engine import SnapshotEngine
from lazysnap.integrations.drain import Bar, DrainBar, RichBar, TqdmBar
from lazysnap.integrations.logged import Logged

logger = logging.getLogger(__name__)


class Figures:
    """Values of ``statistics()`` in the loggers of one fit, every ``log_every_n_steps``. On rank 0."""

    def __init__(self) -> None:
        self._logged = Logged()
        self._last_step: int | None = None
        self._failed: set[int] = set()
        """Loggers that raised."""

    def log(self, trainer: Any, engine: SnapshotEngine) -> None:
        """A step is over; call it before it is captured: what a logger draws from random generators belongs to it."""
        step: int = trainer.global_step
        last = step - 1 if self._last_step is None else self._last_step
        self._last_step = step
        self._logged.note(step)
        every = trainer.log_every_n_steps
        if not trainer.is_global_zero or not trainer.loggers or not every or step // every == last // every:
            return
        values = self._logged.values(engine.statistics(), engine.config.levels)
        for one in trainer.loggers if values else ():
            if id(one) not in self._failed:
                self._log_to(one, values, step)

    def _log_to(self, one: Any, values: dict[str, float], step: int) -> None:
        try:
            one.log_metrics(metrics=dict(values), step=step)
            one.save()
        except Exception as error:  # noqa: BLE001  figures are not worth a training
            self._failed.add(id(one))
            logger.warning("%s takes no figures of snapshots: %s: %s", type(one).__name__, type(error).__name__, error)


def drain_bar(trainer: Any) -> DrainBar:
    """The bar for the end of a fit: one that looks as the trainer's own, if it shows one."""
    own = trainer.progress_bar_callback

    def make() -> Bar:
        try:
            if own is not None and not own.is_disabled and hasattr(own, "init_train_tqdm"):
                return TqdmBar(own.init_train_tqdm())
            if own is not None and not own.is_disabled and hasattr(own, "theme"):
                own.progress.stop()  # one that is still live, and a second one, hinder each other
                theme = own.theme
                column = BarColumn(complete_style=theme.progress_bar, finished_style=theme.progress_bar_finished)
                return RichBar(own._console, column)
        except Exception as error:  # noqa: BLE001  a bar of the program's own may be anything
            logger.info("the trainer's progress bar cannot show the end: %s", error)
        return RichBar()

    return DrainBar(is_rank_zero=trainer.is_global_zero, make=make)
