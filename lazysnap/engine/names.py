"""Names that snapshots are kept under: wanted, and given to a capture. They never go to another one."""

from collections.abc import Collection

from lazysnap.engine.messages import Event, Messages
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.protocol import Release, Store


class Names:
    """The names that ``keep`` gave, of one engine. Used on the training thread."""

    def __init__(self, client: KeeperClient, messages: Messages) -> None:
        self._messages = messages
        self._client = client
        self.wanted: list[str] = []
        """Names for the next capture."""
        self._given: dict[int, list[str]] = {}
        """Names that were given, by step."""

    def give(self, step: int, names: list[str]) -> None:
        """The capture of ``step`` gets these names, at every level."""
        self._given.setdefault(step, []).extend(names)
        for name in names:
            self._client.name(Store(step, name))

    def give_wanted(self, step: int) -> None:
        """A capture began: it gets the names that wait for one."""
        wanted, self.wanted = self.wanted, []
        self.give(step, wanted)

    def described(self, steps: Collection[int]) -> str:
        """Steps with the names that they were given, for a message."""
        return ", ".join(f"step {step} ({', '.join(map(repr, self._given.get(step, [])))})" for step in steps)

    def unstored(self) -> list[str]:
        """Names of captures that the first level is not known to have."""
        return [name for step, names in self._given.items() if not self._client.is_stored(step) for name in names]

    def begin_run(self) -> None:
        """Another state is loaded: the next capture is not the one that was to be called so."""
        self._given = {}
        self._give_up_wanted("went back")

    def end(self) -> None:
        """Nothing is captured any more."""
        self._give_up_wanted("ended")

    def _give_up_wanted(self, did: str) -> None:
        if self.wanted:
            self._messages.tell(Event.NAMES_UNUSED, names=self.wanted, did=did)
            self.wanted = []

    def release(self, name: str) -> None:
        """Take the name from every snapshot of the run."""
        self.wanted = [wanted for wanted in self.wanted if wanted != name]
        for names in self._given.values():
            if name in names:
                names.remove(name)
        self._client.name(Release(name))
