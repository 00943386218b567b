"""Queues copies from one device into a slot, on a side stream, ordered by events in both directions.

The slot is page-locked where the device knows that, so that its DMA engine writes directly into memory that survives
the trainer; no second host copy. Sequence at a boundary:

1. on the compute stream: frozen tensors are compared with their bytes in the slot (``capture.frozen``), and skipped
   below; eager tensors (they may change in forward) are copied into a staging buffer on the device, or to the host
   beyond ``STAGED_BYTES``;
2. the side stream waits for an event recorded after step 1; so it also waits for the optimizer's kernels; 3. on the
side stream: small lazy tensors into the staging buffer, then runs of the staging buffer and each big tensor
   to the host, in file order, events in between. The copy thread waits for these events;
4. the gate makes the compute stream wait for an event after all copies: no host thread blocks.

Into a slot that is not page-locked the copy thread copies instead of the side stream, through its own page-locked
buffers (``pieces_of``). The gate then waits for the copy thread, as for copies from a CPU.

The device writes no control words. Calls wait for it only to copy large eager tensors into a slot that is not
page-locked.
"""

import ctypes
import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from operator import itemgetter

import torch

from lazysnap.capture.capture import Capture
from lazysnap.capture.devices import event_for_thread
from lazysnap.capture.frozen import FrozenTensors
from lazysnap.capture.plan import CapturePlan, view_of
from lazysnap.capture.registration import register

logger = logging.getLogger(__name__)

_STAGED_LAZY_BYTES = 256 << 10
"""Lazy tensors up to this size pass through the staging buffer, in one copy with adjacent ones in the file."""
STAGED_BYTES = 64 << 20
"""Maximum bytes of eager tensors in the staging buffer, which exists as long as training runs."""
EVENT_BYTES = 64 << 20
"""Bytes copied between two events that move the watermark."""

CHUNK_BYTES = 16 << 20
"""A piece of device memory: the bytes that the copy thread copies to the host at a time."""
_rings_of_thread = threading.local()

Transfer = tuple[int, torch.Tensor, torch.Tensor]
"""Start in the image, its place in the slot, source on the device."""


class DeviceCopier:
    """Copies for one device. Methods are called on the training thread.

    They wait for the device only if eager tensors are large and the slot is not page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device)
        self._plan: CapturePlan | None = None
        self._runs: list[tuple[int, torch.Tensor]] = []
        """Adjacent tensors that are copied together: their start in the image, and their staging buffer."""
        self._large: dict[bool, list[int]] = {}
        """Tensors that are copied without staging, the lazy ones under ``True``."""
        self._staging: dict[int, torch.Tensor] = {}
        self._frozen: FrozenTensors | None = None
        self._done: torch.Event | None = None
        self._has_warned = False

    def begin(self, capture: Capture) -> None:
        """Queue all copies of this device. ``arrivals`` and ``device_copies`` of the capture list the queued copies,
        also if this raises (out of memory, for example).
        """
        is_locked = register(capture.slot, self._device)  # usually done before, in the background
        with torch.accelerator.device_index(self._device.index), torch.no_grad():
            if capture.plan is not self._plan:
                self._prepare(capture.plan)
            before = event_for_thread(self._device, enable_timing=True)
            try:
                self._queue(capture, is_locked=is_locked)
            except BaseException:
                self._end(capture, before)
                raise
            if is_locked:
                self._end(capture, before)
            else:
                capture.arrivals.append((capture.plan.layout.size_bytes, partial(self._end, capture, before)))

    def gate(self) -> tuple[torch.Event, torch.Event]:
        """Make the compute stream wait until the copies are done. Return the events before and after its wait."""
        compute = torch.accelerator.current_stream(self._device)
        before = torch.Event(self._device, enable_timing=True)
        behind = torch.Event(self._device, enable_timing=True)
        before.record(compute)
        if self._done is not None:
            compute.wait_event(self._done)
        behind.record(compute)
        return before, behind

    def _queue(self, capture: Capture, *, is_locked: bool) -> None:
        compute = torch.accelerator.current_stream(self._device)
        assert self._frozen is not None  # made with the plan
        try:
            unchanged = self._frozen.unchanged(capture)
            self._stage(capture, lazy=False)
            eager = self._transfers(capture, unchanged, lazy=False)
            if is_locked:
                self._send(capture, eager)
            else:
                for _, host, source in eager:
                    _bring(host, source, compute.record_event())
        finally:
            self._side.wait_event(compute.record_event())
        with self._side:
            self._frozen.check(capture, unchanged)
            self._stage(capture, lazy=True)
            lazy = self._transfers(capture, unchanged, lazy=True)
            if is_locked:
                self._send(capture, lazy)
            else:
                ready = self._side.record_event()
                for start, host, source in lazy:
                    capture.arrivals.append((start, partial(_bring, host, source, ready)))

    def _end(self, capture: Capture, before: torch.Event) -> None:
        """Record the end of all copies of this device: the gate and the copy thread wait for it."""
        with torch.accelerator.device_index(self._device.index), self._side:
            self._done = self._side.record_event()
            capture.device_copies.append((before, event_for_thread(self._device, enable_timing=True)))

    def _prepare(self, plan: CapturePlan) -> None:
        """Find the runs of adjacent tensors and make their staging buffers, once per plan."""
        # Buffers of the last plan return to the compute stream, which passed the gate after the copies from them.
        self._plan = None
        self._large = {True: [], False: []}
        self._runs = []
        self._staging = {}
        self._frozen = FrozenTensors(plan, self._device)
        members: list[int] = []
        eager_room = STAGED_BYTES
        for index in plan.order:
            record = plan.records[index]
            if record.device != self._device or not record.nbytes:
                continue
            room = eager_room
            if record.lazy:
                room = _STAGED_LAZY_BYTES
            if index in self._frozen or record.nbytes > room:
                self._large[record.lazy].append(index)
                continue
            if not record.lazy:
                eager_room -= record.nbytes
            if members and plan.records[members[-1]].offset + plan.records[members[-1]].nbytes != record.offset:
                self._close_run(plan, members)
                members = []
            members.append(index)
        if members:
            self._close_run(plan, members)
        self._plan = plan  # only now: memory for the buffers may be short
        self._warn_of_large(plan, self._frozen)

    def _warn_of_large(self, plan: CapturePlan, frozen: FrozenTensors) -> None:
        """Warn once about eager tensors that are copied to the host while the compute stream waits."""
        records = [plan.records[index] for index in self._large[False] if index not in frozen]
        if records and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d tensors on %s that no optimizer holds (%s, …) are copied while the device waits, at every capture: "
                "they are %.1f GB. Training is faster if they are on the CPU, or no part of the state",
                len(records),
                self._device,
                records[0].name,
                sum(record.nbytes for record in records) / 1e9,
            )

    def _close_run(self, plan: CapturePlan, members: list[int]) -> None:
        first = plan.records[members[0]]
        last = plan.records[members[-1]]
        # Offsets in the file are multiples of the item size, so the same offsets modulo 16 keep views aligned.
        lead = first.offset % 16
        num_bytes = last.offset + last.nbytes - first.offset
        with torch.inference_mode(False):  # as in ``view_of``
            buffer = torch.empty(lead + num_bytes, dtype=torch.uint8, device=self._device)
            for index in members:
                record = plan.records[index]
                start = lead + record.offset - first.offset
                staged = buffer[start : start + record.nbytes]
                self._staging[index] = staged.view(record.stored_dtype).view(record.stored_shape)
            self._runs.append((first.offset, buffer[lead:]))

    def _stage(self, capture: Capture, *, lazy: bool) -> None:
        places = []
        sources = []
        for index, place in self._staging.items():
            if capture.plan.records[index].lazy is lazy:
                places.append(place)
                sources.append(capture.sources[index].detach())
        if places:
            torch._foreach_copy_(places, sources)

    def _send(self, capture: Capture, transfers: Iterable[Transfer]) -> None:
        """Queue copies into the page-locked slot on the current stream."""
        starts: list[int] = []
        sent = 0
        for start, host, source in transfers:
            host.copy_(source.contiguous(), non_blocking=True)
            starts.append(start)
            sent += host.nbytes
            if sent >= EVENT_BYTES:
                self._mark(capture, starts)
                starts = []
                sent = 0
        self._mark(capture, starts)

    def _mark(self, capture: Capture, starts: list[int]) -> None:
        landed = event_for_thread(self._device)
        for start in starts:
            capture.arrivals.append((start, landed.synchronize))

    def _transfers(self, capture: Capture, unchanged: Collection[int], *, lazy: bool) -> list[Transfer]:
        """Return copies to the host in file order: of large tensors, and with the lazy ones those of the runs.

        ``unchanged``: large tensors whose bytes are in the slot.
        """
        transfers: list[Transfer] = []
        for index in self._large[lazy]:
            if index not in unchanged:
                host = capture.plan.view(capture.slot, index)
                transfers.append((capture.plan.records[index].offset, host, capture.sources[index].detach()))
        if lazy:
            for start, buffer in self._runs:
                host = view_of(capture.slot.image, start, torch.uint8, (buffer.nbytes,))
                transfers.append((start, host, buffer))
        return sorted(transfers, key=itemgetter(0))


def _bring(host: torch.Tensor, source: torch.Tensor, ready: torch.Event) -> None:
    """Copy ``source`` into memory that is not page-locked. Blocks."""
    target = host.data_ptr()
    for piece in pieces_of(source, ready):
        ctypes.memmove(target, (ctypes.c_ubyte * len(piece)).from_buffer(piece), len(piece))
        target += len(piece)


def pieces_of(tensor: torch.Tensor, ready: torch.Event) -> Iterator[memoryview]:
    """Yield views of the bytes of ``tensor``, which is on a device; each is valid until the next.

    Blocks: until everything before ``ready`` and each copy to the host is done. Copies run on a separate stream, so
    training's kernels wait for nothing. The device copies a piece while the caller uses the piece before.
    """
    side, buffers = _ring(tensor.device)
    with torch.accelerator.device_index(tensor.device.index), side:
        side.wait_event(ready)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    parts = torch.split(flat, CHUNK_BYTES)
    queued = _queue(parts[0], side, buffers[0])
    for number in range(len(parts)):
        landed = queued
        if number + 1 < len(parts):
            queued = _queue(parts[number + 1], side, buffers[(number + 1) % 2])
        with torch.accelerator.device_index(tensor.device.index):
            landed.synchronize()
        address = buffers[number % 2].data_ptr()
        yield memoryview((ctypes.c_ubyte * parts[number].nbytes).from_address(address)).cast("B")


def _queue(part: torch.Tensor, side: torch.Stream, buffer: torch.Tensor) -> torch.Event:
    with torch.accelerator.device_index(part.device.index), side:
        buffer[: part.nbytes].copy_(part, non_blocking=True)
        part.record_stream(side)  # a caller that takes no further piece may release the tensor
        return event_for_thread(part.device)


def _ring(device: torch.device) -> tuple[torch.Stream, list[torch.Tensor]]:
    """Return a stream and two page-locked buffers that only this thread uses."""
    rings = vars(_rings_of_thread)
    key = str(device)
    if key not in rings:
        rings[key] = (torch.Stream(device), [_locked_buffer(), _locked_buffer()])
    stream, buffers = rings[key]
    return stream, buffers


def _locked_buffer() -> torch.Tensor:
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
