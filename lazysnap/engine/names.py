"""Names that snapshots are kept under: wanted, given to a capture, and given again if that capture is lost."""

import logging

from lazysnap.errors import ConfigError
from lazysnap.keeper.client import KeeperClient
from lazysnap.shard.names import is_keep_name

logger = logging.getLogger("lazysnap.engine")

_RESERVED = ("latest",)


def check_name(name: str) -> None:
    """Raises: ConfigError, if no snapshot may be called so."""
    if not is_keep_name(name) or name in _RESERVED or name.isdigit():
        raise ConfigError(
            f"a snapshot's name must be 1 to 64 letters, digits, points, dashes or underscores (not 'latest', "
            f"nor digits alone: those are steps), got {name!r:.100}"
        )


class Names:
    """Of one engine; used on the training thread."""

    def __init__(self, client: KeeperClient) -> None:
        self._client = client
        self.wanted: list[str] = []
        """For the next capture."""
        self._given: dict[int, tuple[int, list[str]]] = {}
        """By sequence number: the step and its names."""

    def give(self, step: int, sequence: int, names: list[str]) -> None:
        """The capture gets these names, at every level."""
        _, held = self._given.get(sequence, (step, []))
        self._given[sequence] = step, [*held, *names]
        for name in names:
            self._client.keep(name, step)

    def lost(self, sequence: int) -> None:
        """The capture is worth nothing: the next one is called so."""
        _, names = self._given.pop(sequence, (0, []))
        self.wanted += names

    def overwritten(self, sequence: int) -> None:
        """The capture goes from memory: if storage did not get it, the next one is called so."""
        step, _ = self._given.get(sequence, (0, []))
        if sequence in self._given and not self._client.is_stored(step):
            self.lost(sequence)

    def begin_run(self) -> None:
        """Another state is loaded: the next capture is not the one that was to be called so."""
        self._given = {}
        if self.wanted:
            logger.warning("no snapshot is called %s: training went back before it was captured", self.wanted)
            self.wanted = []

    def say_again(self) -> None:
        """To a keeper that is new: all names of this start.

        Those of steps that are stored, too: the last keeper may have died before it wrote them.
        """
        for step, names in self._given.values():
            for name in names:
                self._client.keep(name, step)

    def release(self, name: str) -> None:
        """Take the name from every snapshot of the run."""
        self.wanted = [wanted for wanted in self.wanted if wanted != name]
        for _, names in self._given.values():
            if name in names:
                names.remove(name)
        self._client.release(name)
