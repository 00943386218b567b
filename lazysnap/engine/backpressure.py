"""How long captures wait for storage, and what storage gets when it does not keep up. Pure.

With several ranks every capture that is due is pinned, on all ranks alike, and a capture waits while storage holds all
slots. A level that hangs, is too slow, or whose keeper is frozen must not stop training: the waits of one rank add up
to ``gate_timeout_s`` at most. Then storage is *bypassed*: no capture waits, and storage holds one capture at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lazysnap.arena import SlotStatus
from lazysnap.config import PersistentLevel
from lazysnap.keeper.protocol import Durable
from lazysnap.policy import STRIDES, is_wanted

_REMEMBERED = 16


class Backpressure:
    """Of one rank.

    Holding -> bypassed, when the waits are used up or the keeper does not answer; back, when a capture was stored
    before the next one was due.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.waited_s = 0.0
        """How long captures have waited since storage kept up last."""
        self.is_bypassed = False
        self.left_out = 0
        """Captures that were due and that storage did not get, since it is bypassed."""
        self._stride = 1
        self._has_stored = False
        """Whether a capture was stored since storage is bypassed. How long the first one took says nothing."""
        self._taken: dict[int, int] = {}
        """Captures that storage got, by sequence number: how many became due while it held them."""
        self._stored: dict[int, Durable] = {}

    def is_over(self, waited_s: float) -> bool:
        """Whether a capture that waited so long already waits no longer."""
        return self.is_bypassed or self.waited_s + waited_s >= self._patience_s

    def waited(self, seconds: float) -> None:
        """A capture waited for a slot."""
        self.waited_s += seconds

    def bypass(self, statuses: Iterable[SlotStatus]) -> None:
        """Storage does not keep up, or its keeper does not answer."""
        if not self.is_bypassed:
            self.left_out = 0
        self.is_bypassed, self._has_stored, self._stride = True, False, 1
        self._taken = dict.fromkeys(_pinned(statuses), 0)

    def without_pins(self, statuses: Sequence[SlotStatus], spared: int) -> list[SlotStatus]:
        """The statuses with the pins of the ``spared`` oldest captures alone.

        What reads a slot of which the pin is passed over finds another capture there, and commits nothing.
        """
        spare = set(sorted(_pinned(statuses))[:spared])
        return [replace(status, pinned=status.pinned and status.sequence in spare) for status in statuses]

    # ---------------------------------------------------------------- which captures storage gets

    def is_turn(self, level: PersistentLevel, step: int) -> bool:
        """Whether a capture that is due at ``level`` is one that storage gets, if it holds no other.

        Multiples of a power of two: what a slow rank stores, each faster one stores as well.
        """
        return is_wanted(level, step) or (step // level.every_n_steps) % self._stride == 0

    def passed(self, sequence: int, *, pinned: bool, held: Iterable[SlotStatus]) -> None:
        """A capture that was due begins; ``pinned``: storage gets it. ``held``: what storage holds beside it."""
        holds = set(_pinned(held))
        for known in self._taken.keys() & holds:
            self._taken[known] += 1
        if not holds:
            self.waited_s = 0.0  # storage has all that it was given: it keeps up
        if not self.is_bypassed:
            return
        if pinned:
            self._taken[sequence] = 0
        else:
            self.left_out += 1

    def look(self, statuses: Iterable[SlotStatus], stored: Iterable[Durable]) -> Durable | None:
        """What storage did, at a boundary; ``stored``: since the last one. The first capture that was stored since
        storage is bypassed, when it is that one.
        """
        self._stored |= {event.sequence: event for event in stored}
        self._stored = dict([*self._stored.items()][-_REMEMBERED:])
        if not self.is_bypassed:
            return None
        let_go = sorted(self._taken.keys() - set(_pinned(statuses)))
        for sequence in let_go:
            if sequence not in self._stored:
                continue
            passed = self._taken.pop(sequence)
            if not self._has_stored:
                self._has_stored = True
                return self._stored[sequence]
            self._stride = next((stride for stride in STRIDES if stride > passed), STRIDES[-1])
            if self._stride == 1:
                self.is_bypassed, self.waited_s, self._taken = False, 0.0, {}
                return None
        for sequence in let_go[:-_REMEMBERED]:  # failed, or passed over: nothing more is heard of it
            self._taken.pop(sequence, None)
        return None


def _pinned(statuses: Iterable[SlotStatus]) -> list[int]:
    return [status.sequence for status in statuses if status.pinned]
