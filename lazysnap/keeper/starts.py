"""The starts that the trainers of one rank captured, as far as anything of them may be in its slots."""

from lazysnap.keeper.protocol import Run
from lazysnap.memory.arena import Slot, Word
from lazysnap.topology import Team

_KEPT = 4


class Starts:
    """The newest starts of one rank. Each begins above the sequence numbers of the one before it."""

    def __init__(self) -> None:
        self._begun: list[tuple[Run, Team]] = []
        """Each with the ranks that there were then; the newest last."""

    def __contains__(self, start: str) -> bool:
        return any(run.start == start for run, _ in self._begun)

    @property
    def newest(self) -> tuple[Run, Team] | None:
        """The start that is captured now, or was last, and the ranks that there were."""
        return self._begun[-1] if self._begun else None

    def begin(self, run: Run, team: Team) -> None:
        """Captures from now on are of this start. One that captured nothing before it is forgotten."""
        if self.newest is None or self.newest[0].start != run.start:
            earlier = [known for known in self._begun if known[0].floor < run.floor]
            self._begun = [*earlier, (run, team)][-_KEPT:]

    def forget(self, start: str) -> None:
        """Nothing of that start is held."""
        self._begun = [known for known in self._begun if known[0].start != start]

    def is_over(self, start: str) -> bool:
        """True if another start began after it."""
        return self.newest is not None and self.newest[0].start != start

    def holds(self, slot: Slot, start: str) -> bool:
        """True if what the slot shows is a capture of that start. Only its words are read: this is asked often."""
        sequence, found = slot.word(Word.SEQUENCE), None
        for run, _ in self._begun:
            if sequence > run.floor:
                found = run.start
        return found == start

    def num_ranks_of(self, start: str) -> int:
        """The number of ranks that the node had in that start; 0, if its trainer does not know it."""
        return next((len(team.node_ranks) for run, team in self._begun if run.start == start), 0)
