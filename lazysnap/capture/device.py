"""Queues copies from one device into a slot, on a side stream, ordered by events in both directions.

The slot is page-locked where the device knows that, so that its DMA engine writes directly into memory that survives
the trainer; no second host copy. Sequence at a boundary:

1. on the compute stream: eager tensors are copied into a staging buffer on the device (they may change in forward);
2. the side stream waits for an event recorded behind that; so it also waits for the optimizer's kernels;
3. on the side stream: small lazy tensors into the staging buffer, then runs of the staging buffer and each big tensor
   to the host, in file order, events in between. The copy thread waits for these events;
4. the gate makes the compute stream wait for the event behind all that: no host thread blocks.

The device writes no control words, and no call here waits for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lazysnap.capture.job import CaptureJob
from lazysnap.capture.plan import CapturePlan, view_of
from lazysnap.capture.registration import register

SMALL_BYTES = 256 << 10
"""Lazy tensors up to this size travel through the staging buffer, coalesced with their neighbours in the file."""
EVENT_BYTES = 64 << 20
"""Bytes copied between two events that move the watermark."""


@dataclass(frozen=True)
class _Run:
    """Neighbours in the file that travel as one copy, from ``[start, end)`` of the image."""

    start: int
    end: int
    members: tuple[int, ...]


class DeviceCopier:
    """Copies for one device. Methods are called on the training thread and do not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device)
        self._plan: CapturePlan | None = None
        self._runs: list[_Run] = []
        self._big: list[int] = []
        self._staging: dict[int, torch.Tensor] = {}
        self._run_buffers: list[torch.Tensor] = []
        self._done: torch.Event | None = None

    def begin(self, job: CaptureJob) -> None:
        """Queue all copies of this device. What was queued stands in ``job.arrivals`` and ``job.device_copies``, also
        where this raises: out of memory, for example.
        """
        register(job.slot, self._device)  # usually done before, in the background
        before, behind = (torch.Event(self._device, enable_timing=True, blocking=True) for _ in range(2))
        with torch.accelerator.device_index(self._device.index), torch.no_grad():
            if job.plan is not self._plan:
                self._prepare(job.plan)
            compute = torch.accelerator.current_stream(self._device)
            self._stage(job, lazy=False)
            self._side.wait_event(compute.record_event())
            for index in (*self._big, *self._staging):
                # The allocator must not hand the memory out again before the side stream has read it.
                job.sources[index].record_stream(self._side)
            before.record(self._side)
            try:
                with self._side:
                    self._stage(job, lazy=True)
                    self._send(job)
            finally:
                behind.record(self._side)
                self._done = behind
                job.device_copies.append((before, behind))

    def gate(self) -> tuple[torch.Event, torch.Event]:
        """The compute stream goes no further than here before the copies are done. The events round its wait."""
        compute = torch.accelerator.current_stream(self._device)
        before, behind = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before.record(compute)
        if self._done is not None:
            compute.wait_event(self._done)
        behind.record(compute)
        return before, behind

    def _prepare(self, plan: CapturePlan) -> None:
        """Find the runs of neighbours to coalesce and make their staging buffers, once per plan."""
        # Those of the last plan go back to the compute stream, which passed the gate behind the copies from them.
        self._plan, self._big, self._runs, self._staging, self._run_buffers = None, [], [], {}, []
        members: list[int] = []
        for index in plan.order:
            record = plan.records[index]
            if record.device != self._device or not record.nbytes:
                continue
            if record.lazy and record.nbytes > SMALL_BYTES:
                self._big.append(index)
                continue
            if members and plan.records[members[-1]].offset + plan.records[members[-1]].nbytes != record.offset:
                self._close_run(plan, members)
                members = []
            members.append(index)
        if members:
            self._close_run(plan, members)
        self._plan = plan  # only now: memory for the buffers may be short

    def _close_run(self, plan: CapturePlan, members: list[int]) -> None:
        first, last = plan.records[members[0]], plan.records[members[-1]]
        run = _Run(first.offset, last.offset + last.nbytes, tuple(members))
        # Offsets in the file are multiples of the item size, so the same offsets modulo 16 keep views aligned.
        lead = run.start % 16
        buffer = torch.empty(lead + run.end - run.start, dtype=torch.uint8, device=self._device)
        for index in members:
            record = plan.records[index]
            start = lead + record.offset - run.start
            self._staging[index] = (
                buffer[start : start + record.nbytes].view(record.stored_dtype).view(record.stored_shape)
            )
        self._runs.append(run)
        self._run_buffers.append(buffer[lead:])

    def _stage(self, job: CaptureJob, *, lazy: bool) -> None:
        chosen = [index for index in self._staging if job.plan.records[index].lazy is lazy]
        if chosen:
            torch._foreach_copy_([self._staging[i] for i in chosen], [job.sources[i].detach() for i in chosen])

    def _send(self, job: CaptureJob) -> None:
        starts: list[int] = []
        sent = 0
        for start, host, source in self._transfers(job):
            host.copy_(source, non_blocking=True)
            starts.append(start)
            sent += host.nbytes
            if sent >= EVENT_BYTES:
                self._mark(job, starts)
                starts, sent = [], 0
        self._mark(job, starts)

    def _mark(self, job: CaptureJob, starts: list[int]) -> None:
        landed = torch.Event(self._device, blocking=True)
        landed.record(self._side)
        job.arrivals += [(start, landed) for start in starts]

    def _transfers(self, job: CaptureJob) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Copies in file order: start in the image, host view, device source."""
        big = [(job.plan.records[index].offset, index) for index in self._big]
        runs = [(run.start, -1 - number) for number, run in enumerate(self._runs)]
        for start, which in sorted(big + runs):
            if which >= 0:
                yield start, job.plan.view(job.slot, which), job.sources[which].detach().contiguous()
            else:
                run = self._runs[-1 - which]
                host = view_of(job.slot.buffer, job.slot.image_offset + run.start, torch.uint8, (run.end - run.start,))
                yield start, host, self._run_buffers[-1 - which]
