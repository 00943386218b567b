"""The life of a keeper, and its end. Pure.

::

    WAITING ──a trainer──> SERVING       WAITING ──time is up, or SIGTERM──> DRAINING
    WAITING or LINGERING ──trainers came, and all they said is that training is over──> DRAINING
    WAITING ──a trainer came, and all it said is that it left a capture──> LINGERING

    SERVING ──the last trainer died──> LINGERING ──time is up, or SIGTERM──> DRAINING ──> OVER
       ▲ │                                 │                                    │ ▲
       │ └──────all ended well; or nothing is in memory; or SIGTERM─────────────┼─┘
       └───────────────────────────────a trainer────────────────────────────────┘

LINGERING keeps memory for a restart. DRAINING ends when everything is stored, and unneeded files are deleted; the
coordinator also waits until all nodes know that.

The phase does not decide what is stored. As soon as no rank of any node captures, the coordinator grants the newest
capture that all of them have.
"""

import enum
from dataclasses import dataclass

START_GRACE_S = 30.0
"""Seconds that a keeper waits for its first trainer."""
DRAIN_LIMIT_S = 3600.0
"""Seconds after which a draining keeper ends, even if a level still fails: memory is lost."""
FAREWELL_S = 5.0
"""Seconds that the coordinator waits until all nodes know that everything is stored."""


class Phase(enum.Enum):
    """The phases of a keeper. See the diagram of the module."""

    WAITING = "waiting"
    SERVING = "serving"
    LINGERING = "lingering"
    DRAINING = "draining"
    OVER = "over"


@dataclass
class Lifecycle:
    """The phase, and the time of the last transition.

    Each deadline is compared by the same sum that ``deadlines`` returns. After rounding, a difference might not be over
    at that time, and the loop would spin.
    """

    since: float
    linger_s: float = 0.0
    phase: Phase = Phase.WAITING
    is_terminated: bool = False
    """True after SIGTERM: memory waits for no restart."""
    _drained_at: float | None = None

    def advance(self, now: float, *, is_served: bool, is_restart_expected: bool, is_training_over: bool) -> None:
        """Go to the next phase, if it is time.

        Args:
            now: seconds of a monotonic clock.
            is_served: True if a trainer is attached, or alive and about to connect again.
            is_restart_expected: True if a trainer died and left a whole capture.
            is_training_over: True if all trainers of the node said so.
        """
        if self.phase is Phase.OVER:
            return
        is_time_up = now >= self._deadline()
        may_linger = self.phase in (Phase.WAITING, Phase.SERVING) and not self.is_terminated
        is_wait_over = self.phase is Phase.SERVING or self.is_terminated or is_training_over or is_time_up
        if is_served:
            self._become(Phase.SERVING, now)
        elif self.phase is Phase.DRAINING:
            if is_time_up:
                self._become(Phase.OVER, now)
        elif may_linger and is_restart_expected:
            self._become(Phase.LINGERING, now)
        elif is_wait_over:
            self._become(Phase.DRAINING, now)

    def drained(self, now: float, *, is_drained: bool, do_all_know: bool) -> None:
        """End the keeper if everything is stored.

        Args:
            now: seconds of a monotonic clock.
            is_drained: True if everything is stored, and unneeded files are deleted.
            do_all_know: True if no other node needs this keeper any more.
        """
        assert self.phase is Phase.DRAINING
        if not is_drained:
            self._drained_at = None
            return
        if self._drained_at is None:
            self._drained_at = now
        if do_all_know or now >= self._drained_at + FAREWELL_S:
            self._become(Phase.OVER, now)

    def deadlines(self) -> list[float]:
        """Return the times at which the phase may change."""
        times = []
        if self.phase in (Phase.WAITING, Phase.LINGERING, Phase.DRAINING):
            times.append(self._deadline())
        if self._drained_at is not None:
            times.append(self._drained_at + FAREWELL_S)
        return times

    def _deadline(self) -> float:
        if self.phase is Phase.WAITING:
            return self.since + START_GRACE_S
        if self.phase is Phase.LINGERING:
            return self.since + self.linger_s
        return self.since + DRAIN_LIMIT_S

    def _become(self, phase: Phase, now: float) -> None:
        if self.phase is phase:
            return
        self.phase = phase
        self.since = now
        self._drained_at = None
