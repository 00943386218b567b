"""Levels where one file holds all ranks of a node: the lane of the rank that writes it, and those of the others.

The lead does what any level's lane does, but for where the bytes come from: it asks the other keepers of the node for
their parts of the same capture (``keeper.gathering``). They pin what they are to have there, answer (``keeper.parts``),
and wait for its word, with a deadline. No keeper depends on another one for longer than that.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lazysnap import faults
from lazysnap.arena import Slot
from lazysnap.errors import CaptureAborted, KeeperUnavailable, LevelUnavailable
from lazysnap.keeper.bases import Beat
from lazysnap.keeper.gathering import Gathering, Offer, check_offer
from lazysnap.keeper.lane import Followed, Lane, SlotWork, Waiting, Work
from lazysnap.keeper.launch import connect_to
from lazysnap.keeper.messages import Connection, Message
from lazysnap.keeper.node_source import FilePart, NodeSource, Part
from lazysnap.keeper.parts import CaptureKey, Known, Outcome, meta_in
from lazysnap.keeper.schedule import Committed
from lazysnap.keeper.slot_source import SlotSource
from lazysnap.levels import open_store
from lazysnap.levels.redaction import shown
from lazysnap.levels.shards import NodeCapture
from lazysnap.levels.source import PacedSource
from lazysnap.levels.verified import VerifiedReader
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.stem import Stem

if TYPE_CHECKING:
    from lazysnap.keeper.persist import Persister

logger = logging.getLogger(__name__)

_ASK_S = 1.0
_ANSWER_S = 2.0
_PASSED_S = 2.0
"""How long the lead may take to come back to a capture."""
_GONE_TIMES = 3
"""So often in a row the lead's keeper must be found to be done, or gone, before nothing is expected of it any more."""
_MOST_TIMES = 10
"""Deadlines that a lead which lives may take."""


def lane_for(persister: "Persister", index: int) -> Lane:
    """The lane of one level."""
    if not persister.team.gathers(persister.levels[index]):
        return Lane(persister, index)
    return LeadLane(persister, index) if persister.team.is_lead else FollowerLane(persister, index)


class LeadLane(Lane):
    """Writes for all ranks of the node."""

    def __init__(self, persister: "Persister", index: int) -> None:
        super().__init__(persister, index)
        self._gathering: Gathering | None = None
        self._late: dict[int, int] = {}
        """Local ranks that did not answer in time, the last time, and how often in a row."""
        self._lent: dict[str, Slot] = {}
        """Immutable tensors of the other ranks."""

    def _bring(self, work: SlotWork | Committed) -> None:
        try:
            super()._bring(work)
        finally:
            self._lent.clear()
            if self._gathering is not None:
                self._gathering.close()
                self._gathering = None

    def _write(self, work: SlotWork, beat: Beat) -> Committed:
        faults.point("keeper.persist.begin")
        own = SlotSource(work.slot, work.status, beat)
        gathering = self._gather(own.meta)
        both = _telling(beat, gathering)
        own = SlotSource(work.slot, work.status, both)
        try:
            return self._write_node(work.status.sequence, own, gathering, both)
        except CaptureAborted:
            _tell_if_dropped(own, gathering)
            raise

    def _copy(self, item: Committed, beat: Beat) -> Committed:
        gathering = self._gather(item.meta)
        both = _telling(beat, gathering)
        if item.entry.file is not None:
            return super()._copy(item, both)
        assert item.manifest is not None
        faults.point("keeper.persist.cascade")
        with VerifiedReader(self._origin(item).place(item.entry), item.manifest) as reader:
            try:
                return self._write_node(item.sequence, FilePart(reader), gathering, both, item)
            except CaptureAborted as error:
                # There is no slot here that would be looked at again: left out, and said so.
                raise LevelUnavailable(str(error)) from error

    def _gather(self, meta: CaptureMeta) -> Gathering:
        # The one in use is remembered to tell what became of it; an attempt that was left behind keeps to its own.
        gathering = Gathering(self._persister.team, self._level.url, CaptureKey.of(meta), self._late)
        self._gathering = gathering
        return gathering

    def _write_node(
        self, sequence: int, own: Part, gathering: Gathering, beat: Beat, item: Committed | None = None
    ) -> Committed:
        with contextlib.ExitStack() as stack:
            parts = [own, *self._others(own, gathering, beat, stack)]
            parts.sort(key=lambda part: part.meta.rank)
            faults.point("keeper.node.gathered")
            source = NodeSource(parts)
            store = self._opened(own.meta)
            team, metas = self._persister.team, tuple(part.meta for part in parts)
            origin = None if item is None else self._origin(item)
            stack.enter_context(self._bases.there(store, metas, beat, origin))
            capture = NodeCapture(Stem.of_node(team.node, team.nodes), metas)
            entry, manifest = store.write_entry(capture, PacedSource(source, self._pace, beat), beat=beat)
            faults.point("keeper.node.written")
        # The lead is the first of the node's ranks: the entry and the manifest are as it sees them.
        return Committed(sequence, entry, manifest.meta, self._index, own.size_bytes, manifest)

    def _others(self, own: Part, gathering: Gathering, beat: Beat, stack: contextlib.ExitStack) -> Iterator[Part]:
        key = CaptureKey.of(own.meta)

        def check() -> None:
            beat()
            own.wait(0)
            if self._persister.stopping:
                raise CaptureAborted(f"step {key.step}: a trainer with other levels came")

        faults.point("keeper.node.gather")
        offers = gathering.offers(check, self._level.timeout_s, lambda: self._persister.is_forced, stack)
        for offer in offers.values():
            yield self._part(offer, key, beat, stack)

    def _part(self, offer: Offer, key: CaptureKey, beat: Beat, stack: contextlib.ExitStack) -> Part:
        part: Part
        if offer.slot is not None:
            check_offer(offer.slot, offer.sequence, key)
            part = SlotSource(offer.slot, offer.slot.status(), beat)
        else:
            part = FilePart(self._file(offer, key, stack))
        if CaptureKey.of(part.meta) != key:
            problem = f"the capture of step {key.step} was dropped by another rank of this node"
            raise CaptureAborted(problem) if offer.slot is not None else LevelUnavailable(problem)
        if part.meta.rank != offer.rank:
            raise LevelUnavailable(f"the keeper of rank {offer.rank} of this node offers rank {part.meta.rank}")
        if offer.frozen is not None and part.meta.frozen is not None:
            self._lent[part.meta.frozen.digest] = offer.frozen
        return part

    def _file(self, offer: Offer, key: CaptureKey, stack: contextlib.ExitStack) -> VerifiedReader:
        level = next((level for level in self._persister.levels if level.url == offer.url), None)
        # Each rank may have a disk of its own; other places are those that this one was told of, too.
        if level is None and not os.path.isabs(offer.url):
            raise LevelUnavailable(f"rank {offer.rank} of this node offers {shown(offer.url)}, which is no level here")
        store = open_store(offer.url, options=None if level is None else level.storage_options)
        at = Entry(offer.url, 0, key.run_id, 0, key.step, offer.rank, self._persister.team.world_size, offer.location)
        return stack.enter_context(VerifiedReader(store.place(at), store.read_manifest(at)))

    def _frozen_slot(self, digest: str) -> Slot | None:
        return super()._frozen_slot(digest) or self._lent.get(digest)

    # ---------------------------------------------------------------- what comes after

    def _committed(self, item: Committed, seconds: float) -> None:
        super()._committed(item, seconds)
        assert self._gathering is not None
        faults.point("keeper.node.tell")
        self._tell(self._gathering, Outcome("", item.entry.location, item.entry.file or "", seconds))
        faults.point("keeper.node.told")

    def _failed(self, step: int, sequence: int, error: Exception) -> None:
        super()._failed(step, sequence, error)
        if self._gathering is not None:
            self._tell(self._gathering, Outcome(str(error) or type(error).__name__))

    def _tell(self, gathering: Gathering, outcome: Outcome) -> None:
        with self._persister.changed:  # for those that ask later
            self._persister.news.hear_outcome(self._level.url, gathering.key, outcome)
        gathering.tell(outcome)


def _telling(beat: Beat, gathering: Gathering) -> Beat:
    """What moves here is told to the others, too."""

    def both() -> None:
        beat()
        gathering.move()

    return both


def _tell_if_dropped(own: SlotSource, gathering: Gathering) -> None:
    """Where it is the lead's own part that is gone, nothing comes after."""
    try:
        own.wait(0)
    except CaptureAborted as error:
        gathering.tell(Outcome(str(error)))


class FollowerLane(Lane):
    """Has the lead write, and notes what it says."""

    def __init__(self, persister: "Persister", index: int) -> None:
        super().__init__(persister, index)
        self._keys: dict[int, tuple[CaptureMeta, float]] = {}
        """By the captures' numbers: what they are, and since when they are awaited."""
        self._asked = 0.0
        self._gone = 0

    def followed(self, awaited: Sequence[SlotWork | Committed]) -> Work | None:
        """The first of these of which it is known what became of it. Under the persister's lock."""
        numbers = {_sequence(work) for work in awaited}
        self._keys = {number: known for number, known in self._keys.items() if number in numbers}
        for work in awaited:
            meta, since = self._known(work)
            if meta is None:
                continue  # its capture begins right now
            outcome = self._outcome(CaptureKey.of(meta), since, _sequence(work))
            if outcome is not None:
                return Followed(work, outcome)
        return Waiting() if awaited else None

    def _known(self, work: SlotWork | Committed) -> tuple[CaptureMeta | None, float]:
        number = _sequence(work)
        if number not in self._keys:
            meta = work.meta if isinstance(work, Committed) else meta_in(work.slot.read_meta)
            step = work.entry.step if isinstance(work, Committed) else work.status.step
            if meta is None or meta.step != step:
                return None, 0.0
            self._keys[number] = meta, time.monotonic()
        return self._keys[number]

    def _outcome(self, key: CaptureKey, since: float, sequence: int) -> Outcome | None:
        persister, url = self._persister, self._level.url
        told = persister.news.outcome(url, key)
        if told is not None:
            return told
        lead = f"rank {persister.team.ranks[0]}, which writes for this node,"
        if (persister.news.passed_s(url, key) or 0.0) > _PASSED_S and sequence not in persister.named:
            return Outcome(f"{lead} has left step {key.step} out")
        if self._gone >= _GONE_TIMES:
            return Outcome(f"{lead} has no step {key.step}, or its memory is lost")
        now, patience_s = time.monotonic(), self._level.timeout_s
        if now - max(since, persister.news.last_sign(url, key)) > patience_s or now - since > _MOST_TIMES * patience_s:
            return Outcome(f"{lead} was not heard of for {self._level.timeout_s:g} s")
        return None

    def _idle(self, *, is_waiting: bool) -> None:
        """Ask the lead about what was not heard of for a while: its word may have gone to a keeper that died."""
        persister, now = self._persister, time.monotonic()
        if not is_waiting:
            self._gone = 0
        if not is_waiting or now - self._asked < _ASK_S:
            return
        self._asked = now
        with persister.changed:
            keys = [CaptureKey.of(meta) for meta, since in self._keys.values() if now - since > _ASK_S]
        answer = self._ask([key.fields() for key in keys]) if keys else None
        with persister.changed:
            for key, outcome in answer.outcomes.items() if answer is not None else ():
                persister.news.hear_outcome(self._level.url, key, outcome)
                persister.changed.notify_all()
            # If it lives, what it is at may take its time: copying, reading back.
            for key in keys if answer is not None and not answer.is_done else ():
                persister.news.hear_sign(self._level.url, key)
        # While there is a trainer, a keeper that is gone is replaced.
        self._gone = self._gone + 1 if persister.is_forced and answer is not None and answer.is_done else 0

    def _ask(self, keys: list[Message]) -> Known | None:
        """What the lead's keeper says of these captures; ``None``, if it says nothing that can be understood."""
        try:
            connection = connect_to(self._persister.team.addresses[0])
            if connection is None:
                return Known(is_done=True)
            with contextlib.closing(connection):
                connection.send({"type": "is_done", "level": self._level.url, "keys": keys}, timeout_s=_ANSWER_S)
                message = _answer(connection, time.monotonic() + _ANSWER_S)
            return None if message is None else Known.from_message(message)
        except (KeeperUnavailable, OSError):
            return None
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s: the answer of the keeper that writes for this node: %s", self._where, error)
            return None

    def _take(self, work: Work) -> None:
        super()._take(work)
        if isinstance(work, Followed) and isinstance(work.work, Committed):
            self._persister.states[self._index].queue.remove(work.work)

    def _do(self, work: Work) -> None:
        if isinstance(work, Followed):
            self._note(work.work, work.outcome)
        else:
            super()._do(work)

    def _note(self, work: SlotWork | Committed, outcome: Outcome) -> None:
        meta, _ = self._keys[_sequence(work)]
        if outcome.text:
            self._failed(meta.step, _sequence(work), LevelUnavailable(outcome.text))
            return
        at = (self._level.url, self._index + 1, meta.run_id, meta.run_started_ns, meta.step, meta.rank)
        frozen = None if meta.frozen is None else meta.frozen.digest
        generation = meta.generation
        entry = Entry(*at, meta.world_size, outcome.location, frozen, generation=generation, file=outcome.file)
        size = work.status.image_bytes if isinstance(work, SlotWork) else work.own_bytes
        item = Committed(_sequence(work), entry, meta, self._index, size)
        faults.point("keeper.node.followed")
        self._committed(item, outcome.seconds)
        self._count(item, 0)  # the lead's trainer counts for all that are in its file


def _answer(connection: Connection, deadline: float) -> Message | None:
    """The first message that comes."""
    while (left_s := deadline - time.monotonic()) > 0:
        connection.set_receive_timeout(max(left_s, 0.01))  # nothing at all would be no limit
        received = connection.receive()
        for fd in (fd for _, fds in received or () for fd in fds):
            os.close(fd)  # none were asked for
        if received is None or received:
            return received[0][0] if received else None
    return None


def _sequence(work: SlotWork | Committed) -> int:
    return work.status.sequence if isinstance(work, SlotWork) else work.sequence
