"""The lead's end: asks the other keepers of its node for their parts of a capture, and tells them what became of it."""

import contextlib
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lazysnap.arena import Slot
from lazysnap.errors import CaptureAborted, KeeperUnavailable, LevelUnavailable
from lazysnap.keeper.launch import connect_to
from lazysnap.keeper.messages import Connection, Message
from lazysnap.keeper.parts import CaptureKey, Outcome
from lazysnap.keeper.team import Team
from lazysnap.shard.manifest import is_count, parse_directory_name

_POLL_MS = 20
_MOVING_S = 0.5
_RETRY_S = 0.2
_ALONE_S = 3.0
"""How long a keeper that does not answer is waited for when no trainer is there to start another one."""
_TELL_ATTEMPTS = 5
_LATE = 0.1
"""Part of the deadline for those that were late before: each capture holds slots of all ranks while it waits."""
_FULL_EVERY = 4
"""Of so many tries for those that are late one has the full deadline: they may just be slower than the short one."""


@dataclass(frozen=True)
class Offer:
    """What another keeper has: a slot that is mapped here, or where its file is."""

    sequence: int
    slot: Slot | None
    url: str
    location: str
    rank: int
    frozen: Slot | None
    """Its immutable tensors, if it holds them in memory."""


class Gathering:
    """One capture at one level. ``beat`` and ``close`` may be called from several threads, the rest from one."""

    def __init__(self, team: Team, url: str, key: CaptureKey, late: dict[int, int] | None = None) -> None:
        """``late``: local ranks that came too late the last time, and how often in a row, kept by the caller: until
        they answer once others wait less long for them, but for every fourth time.
        """
        self._team = team
        self._late = {} if late is None else late
        self._fields = {"level": url, **key.fields()}
        self.key = key
        self._connections: dict[int, Connection] = {}
        self._tried: dict[int, float] = {}
        self._moved = time.monotonic()

    def offers(
        self, beat: Callable[[], None], timeout_s: float, is_alone: Callable[[], bool], stack: contextlib.ExitStack
    ) -> Mapping[int, Offer]:
        """What every other keeper of the node has, by local rank. ``is_alone``: whether this one has no trainer.

        Blocks: at most ``timeout_s``. What is mapped is let go with ``stack``.
        Raises: LevelUnavailable, if one of them has no such capture, or does not answer.
        """
        found: dict[int, Offer] = {}
        started = time.monotonic()
        while len(found) < len(self._team.addresses) - 1:
            beat()
            self.move()
            waiting = {number for number in range(1, len(self._team.addresses)) if number not in found}
            self._connect(waiting)
            for number in self._readable(waiting):
                offer = self._read(number, stack)
                if offer is not None:
                    found[number] = offer
                    self._late.pop(number, None)
            waited_s = time.monotonic() - started
            missing = waiting - found.keys()
            lost = missing - self._connections.keys()
            is_short = all(self._late.get(number, 0) % _FULL_EVERY for number in missing)
            patience_s = timeout_s * (_LATE if is_short else 1)
            if missing and (waited_s > patience_s or (lost and is_alone() and waited_s > _ALONE_S)):
                self._late.update({number: self._late.get(number, 0) + 1 for number in missing})
                ranks = ", ".join(str(self._team.ranks[number]) for number in sorted(missing))
                raise LevelUnavailable(
                    f"step {self.key.step} was not captured by rank {ranks} of this node within {waited_s:.0f} s: the "
                    "file of a node holds all of its ranks"
                )
        return found

    def _connect(self, numbers: set[int]) -> None:
        for number in numbers - self._connections.keys():
            if time.monotonic() - self._tried.get(number, 0.0) < _RETRY_S:
                continue
            self._tried[number] = time.monotonic()
            connection = self._reach(number)
            if connection is not None:
                self._connections[number] = connection
                self._send(number, {"type": "gather", **self._fields})

    def _reach(self, number: int) -> Connection | None:
        try:
            return connect_to(self._team.addresses[number])
        except (KeeperUnavailable, OSError):
            return None

    def _send(self, number: int, message: Message) -> bool:
        connection = self._connections.get(number)
        if connection is None:
            return False
        try:
            connection.send(message)
        except OSError:
            self._drop(number)
            return False
        return True

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is not None:
            connection.close()

    def _readable(self, numbers: set[int]) -> list[int]:
        poll = select.poll()
        handles = {}
        for number in numbers & self._connections.keys():
            handles[self._connections[number].sock.fileno()] = number
        for handle in handles:
            poll.register(handle, select.POLLIN)
        if not handles:
            time.sleep(_POLL_MS / 1000)
        return [handles[handle] for handle, _ in poll.poll(_POLL_MS)] if handles else []

    def _read(self, number: int, stack: contextlib.ExitStack) -> Offer | None:
        try:
            received = self._connections[number].receive()
        except (KeeperUnavailable, OSError):
            received = None
        if received is None:
            self._drop(number)
            return None
        rank = self._team.ranks[number]
        try:
            # All of them, first: whatever becomes of the messages, each descriptor has an owner.
            slots = Slot.attach_all(fd for _, fds in received for fd in fds)
            for slot in slots:
                stack.callback(slot.close)
            for message, fds in received:
                return self._offer(message, slots[: len(fds)], rank)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise LevelUnavailable(
                f"rank {rank} of this node: its keeper's answer cannot be used: {error}; do all ranks run the same "
                "version?"
            ) from error
        return None

    def _offer(self, message: Message, slots: list[Slot], rank: int) -> Offer:
        """Raises: LevelUnavailable, if there is none; KeyError, TypeError, ValueError."""
        if message["type"] == "no_part":
            raise LevelUnavailable(f"rank {rank} of this node: {message['text']}")
        url, has_frozen = message["url"], message["frozen"]
        if message["type"] != "part" or type(has_frozen) is not bool or len(slots) != has_frozen + (url is None):
            raise ValueError(f"{message['type']!r:.50} with {len(slots)} descriptors")
        frozen = slots[-1] if has_frozen else None
        if url is None:
            if not is_count(message["sequence"]):
                raise ValueError(f"a capture {message['sequence']!r:.50}")
            return Offer(message["sequence"], slots[0], "", "", rank, frozen)
        if not isinstance(url, str) or parse_directory_name(message["location"]) != self.key.step:
            raise ValueError(f"step {self.key.step} in {message['location']!r:.50} at {url!r:.200}")
        if message["rank"] != rank:
            raise ValueError(f"the file of rank {message['rank']!r:.50}")
        return Offer(0, None, url, message["location"], rank, frozen)

    def move(self) -> None:
        """Tell the others, now and then, that this goes on."""
        if time.monotonic() - self._moved > _MOVING_S:
            self._moved = time.monotonic()
            for number in list(self._connections):
                self._send(number, {"type": "moving", **self._fields})

    def tell(self, outcome: Outcome) -> None:
        """Tell all of them. Blocks: some moments, if one is gone; it may be replaced."""
        message = {"type": "gathered", **self._fields, **outcome.fields()}
        left = set(range(1, len(self._team.addresses)))
        for attempt in range(_TELL_ATTEMPTS):
            for number in sorted(left):
                if number not in self._connections and (connection := self._reach(number)) is not None:
                    self._connections[number] = connection
                if self._send(number, message):
                    left.discard(number)
            if not left:
                return
            if attempt + 1 < _TELL_ATTEMPTS:
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """Let go of the connections; harmless twice."""
        for number in list(self._connections):
            self._drop(number)


def check_offer(slot: Slot, sequence: int, key: CaptureKey) -> None:
    """Whether a slot of another keeper still holds what was offered. Raises: CaptureAborted."""
    status = slot.status()
    if status.sequence != sequence or status.step != key.step:
        raise CaptureAborted(f"the capture of step {key.step} was dropped by another rank of this node")
