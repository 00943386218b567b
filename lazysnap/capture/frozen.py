"""Frozen tensors on a device that need no copy, because the slot holds their bytes already.

Frozen parameters of a fine-tuning can be gigabytes that never change. They are copied once into each slot, and again
only after a change:

* A tensor that was replaced, or written to in a way that torch counts, is detected at the boundary and copied.
* A write through ``.data`` leaves no trace (adapters that are merged, averages of weights). So at each boundary the
device adds up the bytes of each tensor, and compares the sums with those of the bytes in the slot. The result is known
when the copies are done. If a tensor changed, the capture is dropped, and that tensor is copied at every capture from
then on.

The bytes are taken as a matrix of 32-bit numbers, a page in each row. Each row and each column has a sum of 64 bits,
which cannot overflow, so the same change of all numbers does not cancel out. This is no proof: changes that cancel out
in every row and every column are not detected.

The sums are computed on the compute stream at the boundary. They read the tensors twice from the memory of the device,
but send nothing to the host.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.capture.devices import event_for_thread
from lazysnap.capture.plan import CapturePlan, version_of
from lazysnap.memory.slots import TrainerSlot

_LEAST_BYTES = 64 << 10
"""Smaller tensors are copied each time, together with adjacent ones, which is faster than the sums."""
_ROW_BYTES = 4096
_ROW_WORDS = _ROW_BYTES // 4


@dataclass(frozen=True)
class _FrozenImage:
    """The frozen tensors in a slot since a capture."""

    sequence: int
    """Number of that capture in its slot."""
    marks: list[tuple[int, int]]
    """Address and version of each tensor at that boundary."""
    sums: torch.Tensor


class FrozenTensors:
    """The frozen tensors of one plan on one device. Used on the training thread, except ``_compare``.

    Example::

        frozen = FrozenTensors(plan, device)
        unchanged = frozen.unchanged(capture)   # at the boundary, on the compute stream
        ...                                     # copies of all other tensors are queued
        frozen.check(capture, unchanged)        # on the stream of the copies
    """

    def __init__(self, plan: CapturePlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._places: dict[int, slice] = {}
        """The place of each tensor's sums among all sums, by record: sums of its rows, then of its columns."""
        self._num_sums = 0
        for index in plan.order:
            record = plan.records[index]
            if record.device == device and record.is_frozen and record.is_dense and _has_rows(record.nbytes):
                start = self._num_sums
                self._num_sums += record.nbytes // _ROW_BYTES + _ROW_WORDS
                self._places[index] = slice(start, self._num_sums)
        self._images: weakref.WeakKeyDictionary[TrainerSlot, _FrozenImage] = weakref.WeakKeyDictionary()
        self._differences: torch.Tensor | None = None
        """Differences of the sums at this boundary from the sums of the bytes in the slot."""
        self._changing: set[int] = set()
        """Records that changed without a trace, and are copied at every capture."""

    def __contains__(self, index: int) -> bool:
        """True if this record's bytes are compared."""
        return index in self._places

    def unchanged(self, capture: Capture) -> set[int]:
        """Return the records whose bytes are in the slot, as far as the host knows, and queue the sums.

        Call it on the compute stream, once for each capture. Does not wait for the device.
        """
        self._differences = None
        if not self._places:
            return set()
        before = self._images.get(capture.slot)
        marks = []
        for index in self._places:
            source = capture.sources[index]
            marks.append((source.data_ptr(), version_of(source)))
        sums = self._sums(capture)
        self._images[capture.slot] = _FrozenImage(capture.sequence, marks, sums)
        if before is None or before.sequence != capture.previous_sequence:
            return set()
        unchanged = set()
        for index, mark, mark_before in zip(self._places, marks, before.marks, strict=True):
            if mark == mark_before and index not in self._changing:
                unchanged.add(index)
        if unchanged:
            self._differences = sums != before.sums
        return unchanged

    def _sums(self, capture: Capture) -> torch.Tensor:
        sums = torch.empty(self._num_sums, dtype=torch.int64, device=self._device)
        for index, place in self._places.items():
            source = capture.sources[index].detach().reshape(-1)
            if source.data_ptr() % 4:
                source = source.clone()  # a view of a larger tensor, at an odd place
            words = source.view(torch.int32).view(-1, _ROW_WORDS)
            sums_of_tensor = sums[place]
            torch.sum(words, dim=1, dtype=torch.int64, out=sums_of_tensor[: len(words)])
            torch.sum(words, dim=0, dtype=torch.int64, out=sums_of_tensor[len(words) :])
        return sums

    def check(self, capture: Capture, unchanged: Iterable[int]) -> None:
        """Let the capture be dropped if one of these records changed. Queues a copy on the current stream.

        Does not wait for the device: the copy thread does, before anything after their bytes counts as copied.
        """
        if self._differences is None:
            return
        host = torch.empty(self._num_sums, dtype=torch.bool, device="cpu", pin_memory=True)
        host.copy_(self._differences, non_blocking=True)
        landed = event_for_thread(self._device)
        start = min(self._plan.records[index].offset for index in unchanged)
        # The device's own tensor lives until the copy is over.
        compare = partial(self._compare, capture, sorted(unchanged), (self._differences, host), landed)
        capture.arrivals.append((start, compare))
        self._differences = None

    def _compare(
        self,
        capture: Capture,
        unchanged: list[int],
        differences: tuple[torch.Tensor, torch.Tensor],
        landed: torch.Event,
    ) -> None:
        """Drop the capture if a tensor changed. Blocks: until the device has computed the sums. On the copy thread."""
        landed.synchronize()
        _, host = differences
        changed = [index for index in unchanged if bool(host[self._places[index]].any())]
        if not changed:
            return
        self._changing.update(changed)
        names = ", ".join(self._plan.records[index].name for index in changed[:3])
        capture.drop(
            CapturePhase.FAILED,
            f"frozen weights were written to without a trace, through .data for example ({len(changed)}: {names}); "
            "they are copied at every capture from now on",
        )


def _has_rows(num_bytes: int) -> bool:
    """True if a tensor of that size is compared."""
    return num_bytes >= _LEAST_BYTES and num_bytes % _ROW_BYTES == 0
