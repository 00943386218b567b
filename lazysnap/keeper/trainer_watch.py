"""Trainers that come and end, as a keeper sees them: for the events of the run, and for the account of memory."""

from collections.abc import Sequence

from lazysnap import faults
from lazysnap.core.messages import Farewell
from lazysnap.core.ranks import Rank
from lazysnap.keeper.event_log import EventLog, HowEnded
from lazysnap.memory.budget import NODE

_HOW_ENDED: dict[Farewell, HowEnded] = {
    Farewell.NONE: "died",
    Farewell.LEFT: "left",
    Farewell.OVER: "goodbye",
}


class TrainerWatch:
    """Compares the ranks of the core with what they were. Used on the loop's thread."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._pids: dict[int, int] = {}
        """Process that trains, by rank; only of ranks that have one."""
        self._growth: dict[int, int] = {}
        """Bytes that trainers are still going to take, by rank."""

    def compare(self, ranks: Sequence[Rank]) -> None:
        """Note which trainers came and which ended since the last call."""
        for rank in ranks:
            known_pid = self._pids.get(rank.number)
            if known_pid is not None and (not rank.is_served or rank.pid != known_pid):
                self._note_end(rank)
            if rank.is_served:
                if rank.number not in self._pids:
                    self._note_arrival(rank)
                self._note_growth(rank)

    def _note_arrival(self, rank: Rank) -> None:
        self._pids[rank.number] = rank.pid
        faults.point("keeper.attached")
        self._events.trainer_came(rank)

    def _note_end(self, rank: Rank) -> None:
        del self._pids[rank.number]
        self._growth.pop(rank.number, None)
        NODE.forget(rank.number)
        faults.point("keeper.trainer_died")
        how: HowEnded = "died"
        if rank.state is not None and not rank.is_served:
            how = _HOW_ENDED[rank.state.farewell]
        self._events.trainer_ended(rank, how)

    def _note_growth(self, rank: Rank) -> None:
        """Leave the memory free that training itself is still going to take."""
        wish = None if rank.state is None else rank.state.memory
        growth_bytes = 0 if wish is None else wish.growth_bytes
        if self._growth.get(rank.number) != growth_bytes:
            self._growth[rank.number] = growth_bytes
            NODE.expect(rank.number, growth_bytes)
