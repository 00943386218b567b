"""Names that snapshots are kept under: wanted, and given to a capture. They never go to another one."""

from lazysnap.engine.messages import Event, Messages
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.protocol import Release, Store


class Names:
    """The names of one engine's snapshots; the client has those that were given. Used on the training thread."""

    def __init__(self, client: KeeperClient, messages: Messages) -> None:
        self._messages = messages
        self._client = client
        self.wanted: list[str] = []
        """Names for the next capture."""

    def give(self, step: int, names: list[str]) -> None:
        """The capture of ``step`` gets these names, at every level."""
        for name in names:
            self._client.name(Store(step, name))

    def give_wanted(self, step: int) -> None:
        """A capture began: it gets the names that wait for one."""
        self.give(step, self.wanted)
        self.wanted = []

    def begin_run(self) -> None:
        """Another state is loaded: the next capture is not the one that was to be called so."""
        self._give_up_wanted("went back")

    def end(self) -> None:
        """Nothing is captured any more."""
        self._give_up_wanted("ended")

    def _give_up_wanted(self, did: str) -> None:
        for name in self.wanted:
            self._messages.tell(Event.NAME_LOST, name=name, text=f"training {did} before it was captured")
        self.wanted = []

    def release(self, name: str) -> None:
        """Take the name from every snapshot of the run."""
        self.wanted = [wanted for wanted in self.wanted if wanted != name]
        self._client.name(Release(name))
