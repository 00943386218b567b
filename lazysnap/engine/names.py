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
        self._given: dict[int, tuple[int, str, list[str]]] = {}
        """By sequence number: the step, its run and its names."""

    def give(self, step: int, run_id: str, sequence: int, names: list[str]) -> None:
        """The capture gets these names, at every level."""
        *_, held = self._given.get(sequence, (step, run_id, []))
        self._given[sequence] = step, run_id, [*held, *names]
        for name in names:
            self._client.keep(name, step, run_id, sequence)

    def lost(self, sequence: int) -> None:
        """The capture is worth nothing: the next one is called so."""
        *_, names = self._given.pop(sequence, (0, "", []))
        self.wanted += names

    def forget_wanted(self) -> None:
        """Another state is loaded: the next capture is not the one that was to be called so."""
        if self.wanted:
            logger.warning("no snapshot is called %s: training went back before it was captured", self.wanted)
            self.wanted = []

    def say_again(self, durable: int) -> None:
        """To a keeper that is new: what is newer than the step that is ``durable`` at every level."""
        for sequence, (step, run_id, names) in list(self._given.items()):
            if step <= durable:
                del self._given[sequence]
            else:
                for name in names:
                    self._client.keep(name, step, run_id, sequence)

    def release(self, name: str, run_id: str) -> None:
        """Take the name from every snapshot of the run."""
        self.wanted = [wanted for wanted in self.wanted if wanted != name]
        for _, of_run, names in self._given.values():
            if of_run == run_id and name in names:
                names.remove(name)
        self._client.release(name, run_id)
