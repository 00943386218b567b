"""Frozen tensors over a training: chosen, captured once, compared, and captured as all others once they changed."""

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from lazysnap import faults
from lazysnap.capture.frozen import FrozenSet, Parameters, digest_of, frozen_parameters, slices_of
from lazysnap.engine.messages import Event, Messages
from lazysnap.engine.meta import MetaWriter
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.protocol import Return
from lazysnap.memory.arena import Slot, SlotPhase, Word
from lazysnap.memory.failures import CaptureAborted, MemoryBoundExceeded
from lazysnap.shard.manifest import CaptureMeta, FrozenReference
from lazysnap.state.sharding import held_part, local_of
from lazysnap.state.source import StateSource

_MOST_CHANGES = 8
"""A program that changes frozen tensors so often gets none of them stored apart any more."""
_ASK_AGAIN_S = 0.05
_REFUSED_AGAIN_S = 5.0
_STOP_S = 2.0
_UNKNOWN = "0" * 32


class FrozenTensors:
    """The frozen tensors of an engine. Used on the training thread, under the engine's lock."""

    def __init__(self, source: StateSource, client: KeeperClient, messages: Messages, meta: MetaWriter) -> None:
        self._source = source
        self._client = client
        self._messages = messages
        self._meta = meta
        self._set: FrozenSet | None = None
        self._copy: _Copy | None = None
        self.changed: set[str] = set()
        """Names of tensors that were frozen and were found changed: captured at every boundary from then on."""
        self._changes = 0
        self._is_set_up = False
        """True after a boundary. Before it a model is set up: weights are loaded, moved to a device."""

    # ---------------------------------------------------------------- which, and where they are

    def choose(self, named: Iterable[tuple[str, torch.Tensor]]) -> Parameters:
        """The frozen ones among the tensors of the state."""
        return {} if self._changes >= _MOST_CHANGES else frozen_parameters(named, self._source, self.changed)

    def untrained(self, named: Iterable[tuple[str, torch.Tensor]]) -> Collection[str]:
        """Names of what may become frozen: all that is not trained, however little it is."""
        return frozen_parameters(named, self._source, least_bytes=1).keys()

    def prepare(self, *, is_alone: bool) -> None:
        """Begin before the first boundary, if there is nothing yet. Does not block."""
        if self._set is None:
            named = self._source.expected()
            chosen = self.choose(named.items())
            facts = {} if is_alone else {name: facts_of_shard(named[name], name) for name in chosen}
            self._replace(FrozenSet.of(chosen, [(name, local_of(named[name])) for name in chosen], facts=facts))

    def set_for_plan(
        self,
        parameters: Parameters,
        captured: Iterable[tuple[str, torch.Tensor]],
        tied: Mapping[str, str] | None = None,
        facts: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> FrozenSet | None:
        """The set for a new plan (see ``FrozenSet.of``): the same one, if the state says the same."""
        chosen = FrozenSet.of(parameters, captured, tied, facts)
        if chosen is None or self._set is None or not chosen.is_like(self._set):
            self._replace(chosen)
        return self._set

    def _replace(self, frozen: FrozenSet | None) -> None:
        if self._copy is not None:
            self._copy.cancel()
        self._set, self._copy = frozen, None
        self._messages.statistics.frozen_bytes = 0
        if frozen is not None:
            self._begin_copy(frozen)

    def _begin_copy(self, frozen: FrozenSet) -> None:
        self._copy = _Copy(frozen, self._client, self._meta)

    @property
    def names(self) -> set[str]:
        """Every name of the set."""
        return set() if self._set is None else self._set.all_names()

    @property
    def refusal(self) -> str:
        """Why there is no memory for the set; empty if there is, or it is not known yet. Hot."""
        return "" if self._copy is None else self._copy.refusal

    def is_whole(self) -> bool:
        """True if captures may refer to the set: it is whole in a live keeper's memory, or there is none. Hot."""
        if self._set is None or self._copy is None:
            return True
        if not self._copy.digest:
            return False
        if not self._copy.is_held():
            self._begin_copy(self._set)  # the keeper died, and its successor did not get it
            return False
        self._messages.statistics.frozen_bytes = self._set.size_bytes
        return True

    def is_awaited(self) -> bool:
        """True while it is being captured."""
        return not self.is_whole() and self._copy is not None and not self._copy.error

    def reference(self) -> FrozenReference | None:
        """Return the reference of the next capture, with an all-zero digest until the digest is known."""
        if self._set is None or self._copy is None:
            return None
        return FrozenReference(self._copy.digest or _UNKNOWN, self._set.size_bytes)

    # ---------------------------------------------------------------- comparing

    def look(self) -> bool:
        """True if nothing changed; else the set is gone, and the plan has to be made anew. Hot: once per boundary."""
        frozen, copy = self._set, self._copy
        is_set_up, self._is_set_up = self._is_set_up, True
        if frozen is None or copy is None:
            return True
        trained = frozen.trained(self._source.optimizers())
        changed = sorted({*frozen.changed()} - {*trained})
        if changed:
            if is_set_up:
                self._note_changed(changed)
        elif copy.error:
            self._messages.tell(Event.FROZEN_NOT_APART, text=copy.error)
            self._changes = _MOST_CHANGES
        elif not trained:
            return True
        self._replace(None)
        return False

    def _note_changed(self, changed: list[str]) -> None:
        self._changes += 1
        self.changed.update(changed)
        self._messages.statistics.frozen_changed += len(changed)
        self._messages.tell(Event.FROZEN_CHANGED, count=len(changed), name=changed[0])

    # ---------------------------------------------------------------- loading, ending

    def reloaded(self) -> None:
        """The values that the live tensors had were loaded into them again."""
        if self._set is not None:
            self._set.accept()

    def reset(self) -> None:
        """Other values were loaded into the live tensors."""
        self._is_set_up = False
        self._replace(None)

    def close(self) -> None:
        """Let the thread end. Blocks: at most some seconds."""
        if self._copy is not None:
            self._copy.cancel(_STOP_S)
        self._set = self._copy = None


class _Copy:
    """Brings a set into the keeper's memory, in a thread beside training. It ends whole, or with an ``error``."""

    def __init__(self, frozen: FrozenSet, client: KeeperClient, writer: MetaWriter) -> None:
        self._frozen = frozen
        self._client = client
        facts = (writer.run_id, writer.start, 0, 0, 1, time.time_ns())
        self._meta = CaptureMeta(*facts, frozen.logical, frozen.aliases).to_bytes()
        self._start = writer.start
        self._slot: Slot | None = None
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self.digest = ""
        """Once it is whole."""
        self.error = ""
        self.refusal = ""
        """Why the keeper has no memory for it, as long as that is so."""
        threading.Thread(target=self._run, name="lazysnap-frozen", daemon=True).start()

    def is_held(self) -> bool:
        """True if a live keeper holds the copy."""
        slot = self._slot
        is_there = slot is not None and self._client.frozen_slot(self.digest) is slot
        return is_there and slot is not None and slot.status().phase is SlotPhase.WHOLE

    def cancel(self, timeout_s: float = 0.0) -> None:
        """Let it end. Blocks: at most ``timeout_s``, until the thread lets go of slot and tensors."""
        self._cancelled.set()
        self._ended.wait(timeout_s)

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CaptureAborted("cancelled")

    def _digest_of(self, pieces: Iterable[memoryview]) -> str:
        """Return the digest of these bytes. Blocks. Raises: CaptureAborted, if it is cancelled meanwhile."""

        def until_cancelled() -> Iterator[memoryview]:
            for piece in pieces:
                self._check_cancelled()
                yield piece

        return digest_of(until_cancelled())

    def _run(self) -> None:
        try:
            self._bring(self._digest_of(self._frozen.pieces()))
        except Exception as error:  # noqa: BLE001  the last handler of the thread: they become part of every capture
            self.error = str(error) if isinstance(error, LazySnapError) else f"{type(error).__name__}: {error}"
        finally:
            self._ended.set()

    def _bring(self, digest: str) -> None:
        """Have the keeper hold the bytes of that digest. Blocks. Raises: CaptureAborted."""
        while True:
            self._check_cancelled()
            try:
                slot, fills = self._client.ask_frozen(digest, len(self._meta), self._frozen.size_bytes)
            except MemoryBoundExceeded as error:
                self.refusal = str(error)
                self._cancelled.wait(_REFUSED_AGAIN_S)
                continue
            self.refusal = ""
            if slot is not None and fills:
                try:
                    self._fill(slot, digest)
                finally:
                    self._client.tell(Return(digest))
            if slot is not None and self._is_whole(slot, digest):
                self._slot, self.digest = slot, digest
                return
            self._cancelled.wait(_ASK_AGAIN_S)  # no keeper yet, or another rank of the node fills it

    def _fill(self, slot: Slot, digest: str) -> None:
        slot.discard()
        slot.populate()
        room, sequence = slot.image[: self._frozen.size_bytes], slot.word(Word.SEQUENCE) + 1
        slot.begin(0, sequence=sequence, image_bytes=len(room), meta=self._meta, pin=False)
        faults.point("engine.frozen.begun")
        if self._digest_of(self._frozen.copied_into(room)) != digest:
            slot.discard()
            raise CaptureAborted("they changed while they were copied")
        faults.point("engine.frozen.copied")
        slot.commit()
        faults.point("engine.frozen.committed")

    def _is_whole(self, slot: Slot, digest: str) -> bool:
        """True if the slot holds them. Memory of an earlier start is checked like a disk; a damaged slot is released
        and filled again.
        """
        status = slot.status()
        if status.phase is not SlotPhase.WHOLE:
            return False
        with contextlib.suppress(FormatError):
            if CaptureMeta.from_bytes(slot.read_meta()).start == self._start:
                return True
            if self._digest_of(slices_of(slot.image[: self._frozen.size_bytes])) == digest:
                return True
        slot.drop(status.sequence)
        return False


def facts_of_shard(tensor: torch.Tensor, name: str) -> dict[str, Any]:
    """Return the manifest's facts about a DTensor's local shard; none for a plain tensor. See ``Partition.facts``."""
    held = held_part(tensor, name)
    if held is None:
        return {}
    return {"scope": "shard", "global_shape": list(held.global_shape), "offsets": list(held.offsets)}
