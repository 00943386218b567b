"""What the callbacks of frameworks have in common: the engine of the running training, and ``"latest"``."""

from typing import Any

from lazysnap.engine import SnapshotEngine
from lazysnap.errors import ConfigError
from lazysnap.runs import RunChoice

LATEST = "latest"


def means_snapshot(which: Any) -> bool:
    """Whether ``which`` means a snapshot, and not a file or a directory. Raises: ConfigError, for a bad ``"run:…"``."""
    return isinstance(which, str) and (which == LATEST or RunChoice.parse(which) is not None)


class WithEngine:
    """What a callback offers of the running training."""

    @property
    def engine(self) -> SnapshotEngine | None:
        """The engine of the running training, for ``wait(...)`` and the like; ``None`` outside."""
        raise NotImplementedError

    def keep(self, name: str) -> int:
        """Keep the newest snapshot of the running training under ``name``; see ``SnapshotEngine.keep``.

        Raises: ConfigError, also when no training runs.
        """
        return self._running().keep(name)

    def release(self, name: str) -> None:
        """Take ``name`` from the snapshots of the running training; see ``SnapshotEngine.release``.

        Raises: ConfigError, also when no training runs.
        """
        self._running().release(name)

    def _running(self) -> SnapshotEngine:
        if self.engine is None:
            raise ConfigError(f"{type(self).__name__}: keep and release work while a training runs")
        return self.engine
