"""Immutable tensors over the time of a training: chosen, captured once, watched, and let go when they change."""

import logging
import threading
import time
from collections.abc import Callable, Iterable

import torch

from lazysnap import faults
from lazysnap.arena import Slot
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
    """Used on the training thread, under the engine's lock.

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
        self._uncompared: dict[int, Slot] = {}
        """Captures that refer to the set, by sequence number, since all bytes were last compared."""

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
        self._set, self._freezing, self._is_used = frozen, None, False
        self._uncompared.clear()
        self._log.statistics.frozen_bytes = 0
        if frozen is not None:
            self._freeze(frozen)

    def _freeze(self, frozen: FrozenSet) -> None:
        meta = frozen_meta(frozen, self._meta.run_id, self._meta.start, time.time_ns())
        known = {name: self._known[name] for name in frozen.names if name in self._known}
        self._freezing, self._is_known = Freezing(frozen, self._client, meta, known), False

    def is_whole(self) -> bool:
        """Whether captures may refer to the set (or there is none): it is whole in a live keeper's memory. Hot."""
        frozen, freezing = self._set, self._freezing
        if frozen is None or freezing is None:
            return True
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

    @property
    def refusal(self) -> str:
        """Why there is no memory for the set; empty if there is, or it is not known yet. Hot."""
        return "" if self._freezing is None else self._freezing.refusal

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
        changed = sorted({*frozen.changed(), *freezing.changed} - set(left))
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

    def is_as_it_was(self) -> bool:
        """As ``look``, but nothing follows from it."""
        frozen = self._set
        return frozen is None or not (frozen.left(self._source.optimizers()) or frozen.changed())

    def _lose(self, changed: list[str]) -> None:
        """Something wrote to tensors that are not to be trained: they are never believed immutable again."""
        self._losses += 1
        # Before the first capture that is how a model is set up: weights are loaded, moved to a device. Once.
        offenders = [name for name in changed if self._is_used or name in self._suspects]
        self._suspects.update(changed)
        for name in changed:
            self._known.pop(name, None)
        for sequence in [sequence for sequence, slot in self._uncompared.items() if slot.drop(sequence)]:
            self._log.statistics.torn += 1
            self._lost(sequence)
        if offenders:
            self._banned.update(offenders)
            self._log.statistics.frozen_changed += len(offenders)
            self._log.note_once(
                "frozen",
                "%d tensors that need no gradient were changed all the same (%s, …): they are part of every snapshot "
                "from now on. Snapshots in memory since they were last compared byte by byte are dropped; those on "
                "storage hold the values that the tensors had first",
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

    def began(self, slot: Slot, sequence: int) -> None:
        """A capture that refers to the set began."""
        self._is_used = True
        self._uncompared = {known: held for known, held in self._uncompared.items() if held is not slot}
        self._uncompared[sequence] = slot

    def verify(self, timeout_s: float) -> None:
        """Compare all bytes with those that were captured: training closes, or waits for storage.

        Blocks: at most ``timeout_s``. Captures count as right if the comparison fails or takes longer: pointers,
        versions and samples were as they had to be at each boundary.
        """
        if self._set is None or not self._uncompared:
            return
        comparison = _Comparison(self._set)
        comparison.start()
        comparison.join(timeout_s)
        comparison.cancelled.set()
        if comparison.found is None:
            self._log.note_once(
                "comparison",
                "the immutable tensors were not compared byte by byte: %s; snapshots rely on the samples of each step",
                comparison.error or f"it took longer than {timeout_s:g} s",
            )
            return
        differing = {name for name, checksum in comparison.found.items() if self._known[name] != checksum}
        changed = sorted(differing - {*self._set.left(self._source.optimizers())})
        if changed:
            self._lose(changed)
        else:
            self._uncompared.clear()

    # ---------------------------------------------------------------- ending

    def reloaded(self) -> None:
        """The values that the live tensors had were loaded into them again."""
        if self._set is not None:
            self._set.accept()

    def reset(self) -> None:
        """Other values were loaded into the live tensors."""
        self._known.clear()
        self._replace(None)

    def close(self) -> None:
        """Let the thread end. Blocks: at most some seconds."""
        if self._freezing is not None:
            self._freezing.cancel(_STOP_S)
        self._set = self._freezing = None
        self._uncompared.clear()


class _Comparison(threading.Thread):
    """A pass over all bytes of the live tensors. A device that hangs must not hang its caller."""

    def __init__(self, frozen: FrozenSet) -> None:
        super().__init__(name="lazysnap-compare", daemon=True)
        self._frozen = frozen
        self.cancelled = threading.Event()
        self.found: dict[str, str] | None = None
        """A checksum for each tensor, by name, once it ended well."""
        self.error = ""

    def run(self) -> None:
        try:
            faults.point("engine.frozen.compare")
            self.found = self._frozen.digest(self._beat).tensors
        except Exception as error:  # noqa: BLE001  the rim of the thread
            self.error = f"{type(error).__name__}: {error}"

    def _beat(self) -> None:
        if self.cancelled.is_set():
            raise CaptureAborted("cancelled")
