"""Immutable tensors over the time of a training: chosen, captured once, watched, and let go when they change."""

import logging
import threading
import time
from collections.abc import Callable, Iterable

import torch

from lazysnap import faults
from lazysnap.arena import Check, Slot
from lazysnap.capture.checks import demand, discard, passed
from lazysnap.capture.frozen import FrozenSet, choose_frozen
from lazysnap.engine.events import EventLog
from lazysnap.engine.freezing import Freezing, frozen_meta
from lazysnap.engine.meta import MetaWriter
from lazysnap.errors import CaptureAborted
from lazysnap.keeper.client import KeeperClient
from lazysnap.shard.manifest import FrozenReference
from lazysnap.state.source import StateSource
from lazysnap.state.walk import Walk

logger = logging.getLogger("lazysnap.engine")

_MOST_LOSSES = 8
"""A program that so often changes what it called immutable gets none of it stored apart any more."""
_STOP_S = 2.0
_UNKNOWN = "0" * 32


class FrozenTensors:
    """Used on the training thread; the passes over all bytes run in threads of their own.

    ``lost`` is called with the sequence number of each capture that turned out to be worth nothing.
    """

    def __init__(
        self,
        source: StateSource,
        client: KeeperClient,
        log: EventLog,
        meta: MetaWriter,
        lost: Callable[[int], None],
    ) -> None:
        self._source = source
        self._client = client
        self._log = log
        self._meta = meta
        self._lost = lost
        self._set: FrozenSet | None = None
        self._freezing: Freezing | None = None
        self._banned: set[str] = set()
        self._known: dict[str, str] = {}
        """Checksums of tensors that were whole in the keeper's memory once; what differs from them changed."""
        self._is_known = False
        self._losses = 0
        self._suspects: set[str] = set()
        self._is_used = False
        """Whether a capture refers to the set."""
        self._unverified: dict[int, Slot] = {}
        """Captures that refer to the set, by sequence number, that no pass over all bytes has vouched for."""
        self._lock = threading.Lock()
        self._passes: list[_Pass] = []

    # ---------------------------------------------------------------- which, and where they are

    def prepare(self) -> None:
        """Begin before the first boundary, if there is nothing yet. Does not block."""
        if self._set is None:
            self._replace(self._choose(self._source.expected().items()))

    def settle(self, walked: Walk) -> FrozenSet | None:
        """The set for a new plan: the same one, if the state says the same."""
        chosen = self._choose(zip(walked.names, walked.tensors, strict=True))
        if chosen is None or self._set is None or not chosen.is_like(self._set):
            self._replace(chosen)
        return self._set

    def _choose(self, named: Iterable[tuple[str, torch.Tensor]]) -> FrozenSet | None:
        if self._losses >= _MOST_LOSSES:
            return None
        return choose_frozen(named, self._source, self._banned)

    def _replace(self, frozen: FrozenSet | None) -> None:
        if self._freezing is not None:
            self._freezing.cancel()
        for one in self._passes:
            one.cancelled.set()
            # It can never be compared any more, and the keeper waits for that.
            if one.is_running and discard(one.slot, one.sequence):
                self._lost(one.sequence)
        self._passes, self._is_used = [], False
        with self._lock:
            self._unverified.clear()
        self._set, self._freezing = frozen, None
        self._log.statistics.frozen_bytes = 0
        if frozen is not None:
            self._freeze(frozen)

    def _freeze(self, frozen: FrozenSet) -> None:
        meta = frozen_meta(frozen, self._meta.run_id, self._meta.run_started_ns, time.time_ns())
        known = {name: self._known[name] for name in frozen.names if name in self._known}
        self._freezing, self._is_known = Freezing(frozen, self._client, meta, known), False

    def is_whole(self) -> bool:
        """Whether captures may refer to the set (or there is none): it is whole in a live keeper's memory. Hot."""
        frozen, freezing = self._set, self._freezing
        if frozen is None or freezing is None:
            return True
        if freezing.refusal:
            self._log.note_once("memory", "no captures into memory: %s", freezing.refusal)
        if freezing.is_running or freezing.changed or freezing.error:
            return False
        if not freezing.holds():
            self._freeze(frozen)  # the keeper died, and its successor did not get it
            return False
        if not self._is_known and freezing.digest is not None:
            self._known.update(freezing.digest.tensors)
            self._log.statistics.frozen_bytes = frozen.size_bytes
            self._is_known = True
        return True

    def is_awaited(self) -> bool:
        """Whether waiting helps: it is being captured, and no boundary has to look at it first."""
        freezing = self._freezing
        return not self.is_whole() and not (freezing is None or freezing.changed or freezing.error)

    @property
    def names(self) -> set[str]:
        """Every name of the set."""
        return set() if self._set is None else self._set.all_names()

    def reference(self) -> FrozenReference | None:
        """What the next capture refers to; with a digest of noughts as long as it is not known."""
        if self._set is None:
            return None
        digest = self._freezing.digest if self._freezing is not None else None
        return FrozenReference(_UNKNOWN if digest is None else digest.whole, self._set.size_bytes)

    # ---------------------------------------------------------------- watching

    def look(self) -> bool:
        """Whether all is as it was; else the set is gone, and the plan has to be made anew. Hot."""
        frozen, freezing = self._set, self._freezing
        if frozen is None or freezing is None:
            return True
        left = frozen.left(self._source.optimizers())
        changed = sorted({*frozen.changed(), *self._found()} - set(left))
        if changed:
            self._lose(changed)
        elif left:
            self._leave(left)
        elif freezing.error:
            self._log.note_once("frozen", "immutable tensors are part of every snapshot: %s", freezing.error)
            self._losses = _MOST_LOSSES
            self._replace(None)
        else:
            return True
        return False

    def _found(self) -> set[str]:
        """What the passes over all bytes found changed."""
        found = set(self._freezing.changed) if self._freezing is not None else set()
        for one in self._passes:
            found.update(one.changed)
            self._tell_failed(one)
        self._passes = [one for one in self._passes if one.is_running or one.changed]
        return found

    def _tell_failed(self, one: "_Pass") -> None:
        if one.has_failed:
            one.has_failed = False
            self._lost(one.sequence)

    def _lose(self, changed: list[str]) -> None:
        """Something wrote to tensors that are not to be trained: they are never believed immutable again."""
        self._losses += 1
        # Before the first capture that is how a model is set up: weights are loaded, moved to a device. Once.
        offenders = [name for name in changed if self._is_used or name in self._suspects]
        self._suspects.update(changed)
        for name in changed:
            self._known.pop(name, None)
        with self._lock:
            doubtful = list(self._unverified.items())
        for sequence in [sequence for sequence, slot in doubtful if discard(slot, sequence)]:
            self._log.statistics.torn += 1
            self._lost(sequence)
        if offenders:
            self._banned.update(offenders)
            self._log.statistics.frozen_changed += len(offenders)
            self._log.note_once(
                "frozen",
                "%d tensors that need no gradient were changed all the same (%s, …): they are part of every snapshot "
                "from now on, and snapshots in memory that were not compared byte by byte are dropped",
                len(offenders),
                offenders[0],
            )
        self._replace(None)

    def _leave(self, names: list[str]) -> None:
        """An optimizer holds them from now on, or they need a gradient: what was captured before stays right."""
        for name in names:
            self._known.pop(name, None)
        self._replace(None)

    # ---------------------------------------------------------------- captures that refer to the set

    def began(self, slot: Slot, sequence: int, released: threading.Event) -> None:
        """A capture that refers to the set began, and is pinned if its slot says so: then it is compared."""
        if self._set is None:
            return
        self._is_used = True
        with self._lock:
            for known in [known for known, held in self._unverified.items() if held is slot]:
                del self._unverified[known]
            self._unverified[sequence] = slot
        if slot.status().pinned:
            self._compare(slot, sequence, released)

    def demand(self, slot: Slot, sequence: int) -> None:
        """A whole capture is to be persisted after all."""
        with self._lock:
            is_unverified = sequence in self._unverified
        if is_unverified and not any(one.sequence == sequence for one in self._passes):
            demand(slot, Check.FROZEN)
            done = threading.Event()
            done.set()
            self._compare(slot, sequence, done)

    def _compare(self, slot: Slot, sequence: int, released: threading.Event) -> None:
        assert self._set is not None
        one = _Pass(self._set, self._known, slot, sequence)
        self._passes.append(one)
        threading.Thread(target=one.run, args=(released, self._vouch), name="lazysnap-compare", daemon=True).start()

    def _vouch(self, sequence: int) -> None:
        """Captures up to that one began before a pass that found nothing changed."""
        with self._lock:
            vouched = {known: slot for known, slot in self._unverified.items() if known <= sequence}
            for known in vouched:
                del self._unverified[known]
        for known, slot in vouched.items():
            passed(slot, Check.FROZEN, known)

    def verify(self) -> None:
        """Compare all bytes now, before what is in memory is persisted as the last of this training. Blocks."""
        with self._lock:
            newest = max(self._unverified.items(), default=None)
        if self._set is None or newest is None:
            return
        one = _Pass(self._set, self._known, newest[1], newest[0])
        done = threading.Event()
        done.set()
        one.run(done, self._vouch)
        self._tell_failed(one)
        changed = sorted({*one.changed} - {*self._set.left(self._source.optimizers())})
        if changed:
            self._lose(changed)

    # ---------------------------------------------------------------- ending

    def reset(self) -> None:
        """Other values were loaded into the live tensors."""
        self._known.clear()
        self._replace(None)

    def close(self) -> None:
        """Let all threads end. Blocks: at most some seconds."""
        if self._freezing is not None:
            self._freezing.cancel(_STOP_S)
        for one in self._passes:
            one.cancelled.set()
        self._passes = []
        self._set = self._freezing = None


class _Pass:
    """A pass over all bytes of the live tensors, for a capture that the keeper holds back until it ended well."""

    def __init__(self, frozen: FrozenSet, known: dict[str, str], slot: Slot, sequence: int) -> None:
        self._frozen = frozen
        self._known = dict(known)
        self.slot = slot
        self.sequence = sequence
        self.changed: list[str] = []
        self.cancelled = threading.Event()
        self.is_running = True
        self.has_failed = False
        """Whether it could not compare, and dropped the capture for that."""

    def run(self, released: threading.Event, vouch: Callable[[int], None]) -> None:
        """Begin when the copy is ``released``: it is what training waits for."""
        try:
            while not released.wait(0.1):
                self._beat()
            faults.point("engine.frozen.compare")
            found = self._frozen.digest(self._beat).tensors
            self.changed = [name for name, checksum in found.items() if self._known[name] != checksum]
            if not self.changed:
                vouch(self.sequence)
                passed(self.slot, Check.FROZEN, self.sequence)
                return
        except CaptureAborted:
            return
        except Exception as error:  # noqa: BLE001  the rim of the thread
            logger.warning("the immutable tensors could not be compared: %s: %s", type(error).__name__, error)
            self.has_failed = discard(self.slot, self.sequence)
        finally:
            self.is_running = False

    def _beat(self) -> None:
        if self.cancelled.is_set():
            raise CaptureAborted("cancelled")
