"""Messages that a trainer sends to each keeper it comes to."""

from dataclasses import dataclass

from msgspec.structs import replace

from lazysnap.keeper.protocol import Ending, Message, Reserve, Run, ServePeers


@dataclass
class Standing:
    """The facts that each keeper gets when it is reached, the next one included: a keeper may die at any moment.

    Not thread-safe.
    """

    serving: ServePeers | None = None
    """The address at which it serves other nodes."""
    run: Run | None = None
    """The run that is captured. ``is_new`` until a keeper got it."""
    ending: Ending | None = None
    """The notice that this process is about to be killed."""
    wanted: Reserve | None = None
    """The slots that captures need."""

    def for_new_keeper(self, newest_sequence: int) -> list[Message]:
        """Return the messages, in order. ``newest_sequence``: of the captures that the keeper holds."""
        if self.run is not None and self.run.is_new:
            self.run = replace(self.run, floor=newest_sequence)
        told = [one for one in (self.serving, self.run, self.ending, self.wanted) if one is not None]
        self.run_was_told()
        return list[Message](told)

    def run_was_told(self) -> None:
        """Note that a keeper got the run: the next one does not begin it, but takes it over."""
        if self.run is not None:
            self.run = replace(self.run, is_new=False)
