"""Bringing a set of immutable tensors into the keeper's memory, once, beside training."""

import json
import logging
import threading
from collections.abc import Mapping

from lazysnap import faults
from lazysnap.arena import Slot, SlotPhase, Word
from lazysnap.capture.frozen import FrozenSet, ImageDigest, digest_of
from lazysnap.errors import CaptureAborted, MemoryBoundExceeded, ShardCorrupt
from lazysnap.keeper.client import KeeperClient

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.02
_REFUSED_AGAIN_S = 5.0


class Freezing:
    """One attempt, in a thread of its own. It ends whole, or with tensors found ``changed``, or with an ``error``.

    ``known`` are checksums of tensors from earlier passes: what differs from them changed meanwhile.
    """

    def __init__(self, frozen: FrozenSet, client: KeeperClient, meta: bytes, known: Mapping[str, str]) -> None:
        self.frozen = frozen
        self._client = client
        self._meta = meta
        self._known = dict(known)
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self.digest: ImageDigest | None = None
        self.slot: Slot | None = None
        """Holds the image, whole and compared; ``None`` before that."""
        self.changed: list[str] = []
        self.error = ""
        self.refusal = ""
        """Why the keeper has no memory for it, as long as that is so."""
        threading.Thread(target=self._run, name="lazysnap-freeze", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.is_set()

    def holds(self) -> bool:
        """Whether a live keeper holds the image that this one brought."""
        digest, slot = self.digest, self.slot
        if digest is None or slot is None or self._client.frozen_slot(digest.whole) is not slot:
            return False
        return slot.status().phase is SlotPhase.WHOLE

    def cancel(self, timeout_s: float = 0.0) -> None:
        """Let it end. Blocks: at most ``timeout_s``, until the thread lets go of slot and tensors."""
        self._cancelled.set()
        self._ended.wait(timeout_s)

    def beat(self) -> None:
        """Raises: CaptureAborted, once it is cancelled."""
        if self._cancelled.is_set():
            raise CaptureAborted("cancelled")

    def _run(self) -> None:
        try:
            self.digest = self.frozen.digest(self.beat)
            found = self.digest.tensors
            self.changed = [name for name in found if self._known.get(name, found[name]) != found[name]]
            while not self.changed and self.slot is None:
                self._attempt(self.digest)
        except CaptureAborted:
            return
        except Exception as error:  # noqa: BLE001  the rim of the thread: they become part of every capture
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._ended.set()

    def _attempt(self, wanted: ImageDigest) -> None:
        self.beat()
        try:
            slot = self._client.ask_frozen(wanted.whole, len(self._meta), self.frozen.size_bytes)
        except MemoryBoundExceeded as error:
            self.refusal = str(error)
            self._cancelled.wait(_REFUSED_AGAIN_S)
            return
        if slot is None:  # no keeper yet, or it died over the question
            self._cancelled.wait(_ASK_AGAIN_S)
            return
        self.refusal = ""
        image = slot.image[: self.frozen.size_bytes]
        # Another process put it there, some time ago: memory is believed no more than a disk.
        if slot.status().phase is not SlotPhase.WHOLE or self._digest_of(image).whole != wanted.whole:
            slot.discard()
            self._fill(slot, image, wanted)
        if not self.changed and self._client.frozen_slot(wanted.whole) is slot:
            self.slot = slot

    def _fill(self, slot: Slot, image: memoryview, wanted: ImageDigest) -> None:
        slot.populate()
        sequence = slot.word(Word.SEQUENCE) + 1
        slot.begin(0, sequence=sequence, image_bytes=len(image), meta=self._meta, pin=False)
        faults.point("engine.frozen.begun")
        self.frozen.copy_into(image, self.beat)
        faults.point("engine.frozen.copied")
        found = self._digest_of(image)
        if found.whole != wanted.whole:
            slot.discard()
            self.changed = [name for name in found.tensors if found.tensors[name] != wanted.tensors[name]]
            if not self.changed:
                raise ShardCorrupt("the slot of the immutable tensors was written to by something else")
            return
        slot.commit()
        faults.point("engine.frozen.committed")
        self._client.frozen_whole(wanted.whole)

    def _digest_of(self, image: memoryview) -> ImageDigest:
        return digest_of(image, self.frozen.layout, self.beat)


def frozen_meta(frozen: FrozenSet, run_id: str, start: str, captured_ns: int) -> bytes:
    """The metadata of the image, with the keys of ``CaptureMeta``."""
    fields = {
        "run_id": run_id,
        "start": start,
        "step": 0,
        "rank": 0,
        "world_size": 1,
        "captured_ns": captured_ns,
        "tensors": frozen.logical,
        "aliases": frozen.aliases,
        "state": None,
        "packages": {},
    }
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
