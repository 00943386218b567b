"""Copies CUDA tensors into a slot on a side stream, ordered by events in both directions.

The slot is registered with CUDA, so that the device's DMA engine writes directly into memory that survives the
trainer; no second host copy. Sequence at a boundary (DESIGN, section 4):

1. on the compute stream: eager tensors are copied into a staging buffer on the device (they may change in forward);
2. the side stream waits for an event recorded behind that; so it also waits for the optimizer's kernels;
3. on the side stream: small lazy tensors into the staging buffer, then runs of the staging buffer and each big tensor
   to the host, watermarks in between, and the end word last. Stream order makes the end word true: it says N only when
   every byte before it has landed, and no thread has to be alive for that;
4. the gate makes the compute stream wait for an event behind all that: no host thread blocks.

Never run on a GPU so far: no device was at hand. tests/gpu holds the tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lazysnap.capture.job import CaptureJob
from lazysnap.capture.plan import CapturePlan, view_of
from lazysnap.capture.registration import register
from lazysnap.memory.arena import Slot, Word

SMALL_BYTES = 256 << 10
"""Lazy tensors up to this size travel through the staging buffer, coalesced with their neighbours in the file."""
WATERMARK_BYTES = 64 << 20


@dataclass(frozen=True)
class _Run:
    """Neighbours in the file that travel as one copy, from ``[start, end)`` of the image."""

    start: int
    end: int
    members: tuple[int, ...]


class CudaCopier:
    """Copies for one device. Methods are called on the training thread and do not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._plan: CapturePlan | None = None
        self._runs: list[_Run] = []
        self._big: list[int] = []
        self._staging: dict[int, torch.Tensor] = {}
        self._run_buffers: list[torch.Tensor] = []
        self._word = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, job: CaptureJob, *, last: bool) -> torch.cuda.Event:
        """Queue all copies of this device; with ``last`` the end word, too. Returns the event behind them."""
        register(job.slot, self._device)  # usually done before, in the background
        if job.plan is not self._plan:
            self._prepare(job.plan)
        with torch.cuda.device(self._device), torch.no_grad():
            compute = torch.cuda.current_stream(self._device)
            self._stage(job, lazy=False)
            self._side.wait_event(compute.record_event())
            with torch.cuda.stream(self._side):
                self._stage(job, lazy=True)
                # With tensors on other devices, only the thread that waits for all of them knows what has landed.
                self._send(job, watermarks=last)
                if last:
                    self._write_word(job.slot, Word.WATERMARK, job.plan.layout.size_bytes)
                    self._write_word(job.slot, Word.END, job.step + 1)
                for index in (*self._big, *self._staging):
                    # The allocator must not hand the memory out again before the side stream has read it.
                    job.sources[index].record_stream(self._side)
                done: torch.cuda.Event = self._side.record_event()
                return done

    def gate(self, done: torch.cuda.Event) -> None:
        """The compute stream goes no further than here before the copies are done."""
        torch.cuda.current_stream(self._device).wait_event(done)

    def _prepare(self, plan: CapturePlan) -> None:
        """Find the runs of neighbours to coalesce and make their staging buffers, once per plan."""
        torch.cuda.synchronize(self._device)
        self._plan, self._big, self._runs, self._staging, self._run_buffers = plan, [], [], {}, []
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

    def _send(self, job: CaptureJob, *, watermarks: bool) -> None:
        sent = 0
        for start, host, source in self._transfers(job):
            host.copy_(source, non_blocking=True)
            sent += host.nbytes
            if watermarks and sent >= WATERMARK_BYTES:
                self._write_word(job.slot, Word.WATERMARK, start)
                sent = 0

    def _transfers(self, job: CaptureJob) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Copies in file order, as watermarks demand: end in the image, host view, device source."""
        big = [(job.plan.records[index].offset, index) for index in self._big]
        runs = [(run.start, -1 - number) for number, run in enumerate(self._runs)]
        for _, which in sorted(big + runs):
            if which >= 0:
                record = job.plan.records[which]
                host, source = job.plan.view(job.slot, which), job.sources[which].detach().contiguous()
                yield record.offset + record.nbytes, host, source
            else:
                run = self._runs[-1 - which]
                host = view_of(job.slot.buffer, job.slot.image_offset + run.start, torch.uint8, (run.end - run.start,))
                yield run.end, host, self._run_buffers[-1 - which]

    def _write_word(self, slot: Slot, word: Word, value: int) -> None:
        self._word.fill_(value)
        view_of(slot.buffer, 8 * int(word), torch.int64, (1,)).copy_(self._word, non_blocking=True)
