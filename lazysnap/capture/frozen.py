"""Which frozen tensors on a device need no copy, because the slot holds their bytes already?

The parameters of a fine-tuning that have no gradient are gigabytes that never change. Each slot gets them once, and
again only when they did change:

* A tensor that was replaced, or written to in a way that torch counts, is known at the boundary. It is copied.
* A write through ``.data`` leaves no trace (adapters that are merged, averages of weights). So at each boundary the
  device adds up the words of each tensor, row by row, and compares the sums with those of the bytes in the slot. The
  result is known when the copies are done. If a tensor changed, the capture is dropped, and that tensor is copied at
  every capture from then on.

The sums are taken on the compute stream, which passes the boundary only then: 5 ms for 14 GB at 3 TB/s, where the copy
of these bytes to the host takes half a second.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from lazysnap.capture.capture import Capture, Phase
from lazysnap.capture.devices import event_for_thread
from lazysnap.capture.plan import CapturePlan
from lazysnap.memory.slots import TrainerSlot

_LEAST_BYTES = 64 << 10
"""Smaller tensors are copied each time, together with their neighbours: that takes less than adding them up."""
_MOST_ROW_WORDS = 1 << 13
"""Words of 8 bytes with one sum. The sums of all slots take some thousandths of the tensors' memory."""


@dataclass(frozen=True)
class _Image:
    """What a slot has of the frozen tensors since a capture."""

    sequence: int
    """Number of that capture in its slot."""
    marks: list[tuple[int, int]]
    """Address and version of each tensor at that boundary."""
    sums: torch.Tensor


class FrozenTensors:
    """The frozen tensors of one plan on one device. Used on the training thread, but for ``_compare``.

    Example::

        frozen = FrozenTensors(plan, device)
        unchanged = frozen.unchanged(capture)   # at the boundary, on the compute stream
        ...                                     # copies of all other tensors are queued
        frozen.check(capture, unchanged)        # on the stream of the copies
    """

    def __init__(self, plan: CapturePlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._rows: dict[int, slice] = {}
        """Place of each tensor's sums among all sums, by record."""
        self._num_rows = 0
        for index in plan.order:
            record = plan.records[index]
            if record.device == device and record.is_frozen and _row_words(record.nbytes) and record.is_dense:
                num_rows = record.nbytes // 8 // _row_words(record.nbytes)
                self._rows[index] = slice(self._num_rows, self._num_rows + num_rows)
                self._num_rows += num_rows
        self._images: weakref.WeakKeyDictionary[TrainerSlot, _Image] = weakref.WeakKeyDictionary()
        self._differences: torch.Tensor | None = None
        """Of the sums at this boundary from those of the bytes in the slot."""
        self._changing: set[int] = set()
        """Records that changed without a trace: they are copied at every capture."""

    def __contains__(self, index: int) -> bool:
        """True if this record's bytes are compared."""
        return index in self._rows

    def unchanged(self, capture: Capture) -> set[int]:
        """Return the records whose bytes are in the slot, as far as the host can tell. Queues the sums.

        Call it on the compute stream, once for each capture. Does not wait for the device.
        """
        self._differences = None
        if not self._rows:
            return set()
        before = self._images.get(capture.slot)
        marks = []
        for index in self._rows:
            source = capture.sources[index]
            # Of a tensor that was made in inference mode torch counts no writes.
            version = 0 if source.is_inference() else source._version
            marks.append((source.data_ptr(), version))
        sums = self._sums(capture)
        self._images[capture.slot] = _Image(capture.sequence, marks, sums)
        if before is None or before.sequence != capture.previous_sequence:
            return set()
        unchanged = set()
        for index, mark, mark_before in zip(self._rows, marks, before.marks, strict=True):
            if mark == mark_before and index not in self._changing:
                unchanged.add(index)
        if unchanged:
            self._differences = sums != before.sums
        return unchanged

    def _sums(self, capture: Capture) -> torch.Tensor:
        sums = torch.empty(self._num_rows, dtype=torch.int64, device=self._device)
        for index, rows in self._rows.items():
            source = capture.sources[index].detach().reshape(-1)
            if source.data_ptr() % 8:
                source = source.clone()  # a view of a larger tensor, at an odd place
            words = source.view(torch.int64).view(rows.stop - rows.start, -1)
            torch.sum(words, dim=1, out=sums[rows])
        return sums

    def check(self, capture: Capture, unchanged: Iterable[int]) -> None:
        """Have the capture dropped if one of these records did change. Queues a copy on the current stream.

        Does not wait for the device: the copy thread does, before anything behind their bytes counts as copied.
        """
        if self._differences is None:
            return
        host = torch.empty(self._num_rows, dtype=torch.bool, pin_memory=True)
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
        """Drop the capture if a tensor changed. Blocks: until the device added it up. On the copy thread."""
        landed.synchronize()
        _, host = differences
        changed = [index for index in unchanged if bool(host[self._rows[index]].any())]
        if not changed:
            return
        self._changing.update(changed)
        name = self._plan.records[changed[0]].name
        capture.drop(
            Phase.FAILED,
            f"{len(changed)} frozen tensors were written to without a trace ({name}, …), through .data for example; "
            "they are copied at every capture from now on",
        )


def _row_words(num_bytes: int) -> int:
    """Return the number of words in a row; 0 for a tensor that does not fall into rows."""
    if num_bytes % 8 or num_bytes < _LEAST_BYTES:
        return 0
    num_words = num_bytes // 8
    row_words = min(num_words & -num_words, _MOST_ROW_WORDS)
    return row_words if row_words * 8 >= 4096 else 0
