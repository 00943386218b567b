"""The trainer's end: slots to write into, and news from the keeper. Nothing here blocks training.

The training thread reads ``slots`` and ``poll_events`` and sends short notes; it waits only where it asks a question,
with a deadline.
"""

import time
from collections.abc import Callable

from lazysnap.config import SnapshotConfig
from lazysnap.errors import KeeperError
from lazysnap.keeper import protocol
from lazysnap.keeper.client_slots import CaptureState
from lazysnap.keeper.events import KeeperEvent, MemoryInventory
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.link import KeeperLink
from lazysnap.keeper.trainer_state import TrainerState
from lazysnap.links.listener import ReservedPort
from lazysnap.links.secret import Secret
from lazysnap.memory.arena import Slot
from lazysnap.memory.failures import MemoryBoundExceeded
from lazysnap.topology import Team

_FROZEN_S = 600.0
"""The keeper has to find and populate memory for the frozen tensors: some seconds per 10 GB."""
_MAX_RELEASED = 16
"""Released names that the next keeper gets: each costs it a listing of every level."""


class KeeperClient(KeeperLink):
    """A trainer's connection to its keeper, with all that it asks of it. Thread-safe.

    It has many small methods: one for each request.
    """

    def __init__(
        self,
        identity: JobIdentity,
        config: SnapshotConfig,
        team: Team | None = None,
        on_notice: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_notice``: called on the client's thread when the keeper says that this process is about to be killed."""
        state = TrainerState(on_notice)
        super().__init__(identity, config, team or Team(), state)
        self._slots = state.slots

    def start(self) -> None:
        """Connect in the background, starting a keeper if there is none, for captures. Never raises; does not block."""
        self._slots.want()
        self._begin()

    def poll_events(self) -> list[KeeperEvent]:
        """Return the events since the last call."""
        self._send_waiting()
        return self._state.poll_events()

    # ---------------------------------------------------------------- the run

    def adopt_run(self, run: protocol.Run) -> None:
        """Say what is captured from now on; ``floor`` is set here. Does not block.

        From now on ``is_durable`` counts only captures of that start: what an earlier attempt got to storage, even at
        a greater step, does not make this one's steps safe.
        """
        with self._state.lock:
            run, is_told = self._state.adopt_run(run), self._connection is not None
        self.tell(run)
        if is_told:
            self._state.run_was_told()

    def name(self, said: protocol.Store | protocol.Release) -> None:
        """Give a name to a step of this run, or take it away, at this keeper and each later one: a keeper may die
        before it writes the name. Does not block.
        """
        with self._state.lock:  # the next keeper gets it either by the list, or by the message
            names = self._state.names
            if isinstance(said, protocol.Release):  # nothing that was said of this name before matters any more
                names = [one for one in names if one.name != said.name]
            self._state.names = _without_old_releases([*names, said])
            self.tell(said)

    def give_notice(self, *, is_sealed: bool) -> None:
        """Say that this process is about to be killed, to this keeper and the next. Does not block. See ``Leave``."""
        ending = self._state.ending = protocol.Leave("sealed" if is_sealed else "soon")
        self.tell(ending)

    # ---------------------------------------------------------------- slots

    def make_ready(self, work: Callable[[Slot], None]) -> None:
        """Have ``work`` done for every slot in the background, before ``slots`` shows it."""
        self._slots.make_ready = work

    def reserve(
        self,
        capacities: tuple[int, int],
        count: int,
        least: int | None = None,
        growth_bytes: int = 0,
        *,
        spills: bool = True,
    ) -> None:
        """Ask for ``count`` slots. Does not block; they show up in ``slots``, or a ``MemoryRefused`` in the events.

        ``capacities``: bytes of metadata and of the image. ``least``: the smallest count that this training may be
        configured to; for the text of a refusal. ``growth_bytes``: what training itself is still going to take.
        ``spills``: slots may be files where memory does not suffice.
        """
        meta, image = capacities
        wanted = self._state.wanted = protocol.Reserve(
            meta=meta, image=image, count=count, least=least or count, growth=growth_bytes, spills=spills
        )
        self._slots.want()
        self.tell(wanted)

    def slots(self) -> tuple[Slot, ...]:
        """Slots that are populated on both sides and kept by a live keeper, in no order; empty before that."""
        self._send_waiting()
        with self._state.lock:
            return self._slots.ready() if self._connection is not None else ()

    def mapped(self) -> tuple[Slot, ...]:
        """Every slot of a live keeper, of any size, populated or not."""
        with self._state.lock:
            return self._slots.all()

    def return_slot(self, slot: Slot) -> None:
        """Let the keeper free a slot: nothing in it is needed, and this process writes nothing into it from now on.

        Does not block.
        """
        with self._state.lock:  # numbers are those of one connection: it must not end in between
            number = self._slots.remove(slot)
            if number is not None:
                self.tell(protocol.Return(number))

    def newest_sequence(self) -> int:
        """The greatest sequence number of any capture that the keeper holds, also in slots of another size."""
        return self._state.newest_sequence()

    def state_of(self, sequence: int) -> CaptureState:
        """Return the state of the capture with that sequence number."""
        with self._state.lock:
            return self._slots.state_of(sequence)

    def inventory(self, timeout_s: float) -> MemoryInventory:
        """Whole captures that the keeper holds, of this or of a dead trainer, and what they refer to. Blocks.

        Raises: KeeperError, if there is no answer in time.
        """
        reply = self._questions.ask(protocol.AskInventory(local_rank=self._team.local_rank), timeout_s)
        if not isinstance(reply, protocol.Inventory):
            raise KeeperError(f"the keeper did not tell what it holds within {timeout_s:g} s")
        with self._state.lock:
            return MemoryInventory.of(reply, self._slots.get)

    def frozen_slot(self, digest: str) -> Slot | None:
        """Return the slot of frozen tensors of that digest, filled or to be filled; ``None`` if no live keeper holds
        them."""
        with self._state.lock:
            return self._slots.get(digest)

    def ask_frozen(self, digest: str, meta_bytes: int, image_bytes: int) -> tuple[Slot | None, bool]:
        """Ask for a slot for frozen tensors, and whether to fill it; it may be whole, or another rank may fill it.
        ``None``: no keeper answered.

        Blocks: while the keeper finds memory. Raises: MemoryBoundExceeded, if there is none.
        """
        reply = self._questions.ask(protocol.Reserve(frozen=digest, meta=meta_bytes, image=image_bytes), _FROZEN_S)
        if isinstance(reply, protocol.MemoryRefused):
            raise MemoryBoundExceeded(reply.text)
        return (self.frozen_slot(digest), reply.fills) if isinstance(reply, protocol.HandOver) else (None, False)

    # ---------------------------------------------------------------- other nodes

    def reserve_port(self, host: str) -> int:
        """Reserve a port of this address for the keepers of this node, until this process ends or releases it.

        It is the same one for the next keeper, so other nodes learn it once. Raises: OSError, if there is none.
        """
        self._state.release_port()
        self._state.port = ReservedPort(host)
        return self._state.port.number

    def serve_peers(self, host: str, secret: Secret, timeout_s: float) -> bool:
        """Have the keeper, and each later one, serve those with that secret at the reserved port.

        Blocks: at most ``timeout_s``. ``False`` if it does not answer in time: it serves as soon as it runs again.
        """
        assert self._state.port is not None
        serving = self._state.serving = protocol.ServePeers(host=host, port=self._state.port.number, secret=secret)
        return self._questions.ask(serving, timeout_s) is not None

    # ---------------------------------------------------------------- storage

    def newest_durable(self, url: str | None = None) -> int:
        """The newest step of this start that is known to be complete at a level, by default the first one; -1: none."""
        with self._state.lock:
            url = url or next((level.url for level in self._config.levels), "")
            return self._state.durable.newest(url)

    def is_durable(self, step: int) -> bool:
        """True if that step of this start, or a later one, is known to be complete at the first level."""
        return self.newest_durable() >= step

    def lacking(self, step: int) -> list[str]:
        """URLs of the levels that are not known to have that step of this start, or a later one. Thread-safe."""
        with self._state.lock:
            return [level.url for level in self._config.levels if self._state.durable.newest(level.url) < step]

    def drain(
        self,
        step: int | None,
        timeout_s: float,
        progress: Callable[[int, int], None] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Block until that step is complete at every level, and not found damaged; without levels until a keeper has
        it. ``False`` if not. ``None``: there is nothing to wait for.

        ``progress`` is called with bytes that levels have, and bytes that all of them together are to have. A keeper
        that is lost meanwhile is replaced, and the next one is asked. ``enough``: once that is true, wait no longer.
        """
        if step is None:
            return True
        before = self._state.status

        def show() -> bool:
            status = self._state.status
            if progress is not None and status is not before and status.drained[1]:
                progress(*status.drained)
            return enough()

        reply = self._ask_any_keeper(protocol.Drain(step=step), time.monotonic() + timeout_s, show)
        if not isinstance(reply, protocol.Done):
            return False
        show()
        return reply.ok

    # ---------------------------------------------------------------- ending

    def goodbye(self, timeout_s: float) -> None:
        """The job is over: the keeper makes durable what it holds and leaves. Blocks: until then, with a deadline."""
        self._leave(protocol.Leave("over"), timeout_s)

    def abandon(self) -> None:
        """Leave as a crash would: the keeper persists the newest capture and waits for a restart."""
        # A process that lives and only lost its connection would be expected back.
        self._leave(protocol.Leave("left"))


def _without_old_releases(names: list[protocol.Store | protocol.Release]) -> list[protocol.Store | protocol.Release]:
    released = [one for one in names if isinstance(one, protocol.Release)]
    return [one for one in names if one not in released[:-_MAX_RELEASED]]
