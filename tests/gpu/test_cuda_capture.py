"""Captures from a CUDA device: true to the boundary while the next step runs, whole by the device's own word.

Written for ``unittest``, which needs nothing to be installed; pytest runs it as well.
"""

import unittest
import uuid

import torch

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine
from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import make_plan
from lazysnap.engine.captures import Captures
from lazysnap.memory.arena import Slot, SlotPhase
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

TIMEOUT_S = 30


def make(width=2048, device="cuda"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width, dtype=torch.float32)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer, width


def train(model, optimizer, width):
    batch = torch.randn(64, width, device="cuda")
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Bench:
    def __init__(self, extra=None):
        self.parts = make()
        train(*self.parts)
        model, optimizer, _ = self.parts
        self.source = ObjectState({"model": model, "optimizer": optimizer, "extra": extra or {}})
        self.captures = Captures()
        self.slot = None

    def begin(self, step=1):
        walked = walk(self.source.collect())
        plan = make_plan(walked, self.source)
        if self.slot is None:
            self.slot = Slot.create(1 << 16, plan.layout.size_bytes)
            self.slot.populate()
        torch.cuda.synchronize()
        self.expected = {name: tensor.cpu().clone() for name, tensor in zip(walked.names, walked.tensors, strict=True)}
        self.slot.begin(step, sequence=step, image_bytes=plan.layout.size_bytes, meta=b"{}", pin=False)
        job = CaptureJob(plan, self.slot, step, walked.tensors)
        self.captures.begin(job)
        return job

    def check(self, job):
        torch.cuda.synchronize()
        status = self.slot.status()
        assert status.phase is SlotPhase.WHOLE
        assert status.watermark == job.plan.layout.size_bytes
        for index, name in enumerate(job.plan.names):
            assert torch.equal(job.plan.view(self.slot, index), self.expected[name]), name


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class CaptureFromDevice(unittest.TestCase):
    def bench(self, **options):
        made = Bench(**options)
        self.addCleanup(made.captures.close, TIMEOUT_S)
        return made

    def test_the_capture_is_of_the_boundary_though_the_next_step_is_queued_at_once(self):
        it = self.bench()
        for step in range(1, 6):
            job = it.begin(step)
            it.captures.finish(TIMEOUT_S)
            train(*it.parts)
            it.check(job)

    def test_buffers_that_change_in_the_next_forward_are_captured_as_they_were(self):
        it = self.bench()
        job = it.begin()
        model, _, width = it.parts
        with torch.no_grad():
            model(torch.randn(64, width, device="cuda"))  # forward before the gate: running statistics change
        it.captures.finish(TIMEOUT_S)

        it.check(job)

    def test_state_on_cpu_and_device_is_whole_only_when_both_are(self):
        it = self.bench(extra={"counts": torch.arange(1000), "odd": torch.arange(12.0).reshape(3, 4).t()})
        job = it.begin()
        it.captures.finish(TIMEOUT_S)

        it.check(job)

    def test_a_tensor_that_changes_before_the_gate_makes_the_capture_void(self):
        it = self.bench()
        job = it.begin()
        with torch.no_grad():
            it.parts[0][0].weight.add_(1)
        it.captures.finish(TIMEOUT_S)
        torch.cuda.synchronize()

        assert job.phase is CapturePhase.TORN
        assert it.slot.status().phase is SlotPhase.VOID

    def test_strided_conjugate_and_odd_tensors_on_the_device(self):
        base = torch.randn(64, 48, device="cuda")
        extra = {
            "turned": base.t(),
            "strided": base[::2, ::3],
            "half": base.bfloat16(),
            "complex": torch.complex(base, base),
            "conjugate": torch.complex(base, base).conj(),
            "bool": base > 0,
            "empty": base[:0],
            "f8": base.to(torch.float8_e4m3fn),
            "one": torch.ones((), device="cuda"),
        }
        it = self.bench(extra=extra)
        job = it.begin()
        it.captures.finish(TIMEOUT_S)

        it.check(job)

    def test_neither_boundary_nor_gate_waits_for_the_device(self):
        it = self.bench()
        first = it.begin()
        it.captures.finish(TIMEOUT_S)
        it.check(first)  # the slot is registered, the staging buffers are there
        stream = torch.cuda.current_stream()
        torch.cuda._sleep(2_000_000_000)  # about a second of device time before the copies may begin
        walked = walk(it.source.collect())
        it.slot.begin(2, sequence=2, image_bytes=first.plan.layout.size_bytes, meta=b"{}", pin=False)
        job = CaptureJob(first.plan, it.slot, 2, walked.tensors)

        it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)

        assert not stream.query(), "the host waited until the device was done"
        assert it.slot.status().phase is SlotPhase.CAPTURING
        assert it.captures.is_writing(it.slot)
        torch.cuda.synchronize()
        assert it.slot.status().phase is SlotPhase.WHOLE
        assert not it.captures.is_writing(it.slot)

    def test_slots_are_registered_before_they_are_ready_and_not_after_the_end(self):
        config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=5))
        model, optimizer, width = make(width=256)
        engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
        assert engine.wait_ready(TIMEOUT_S)
        views = [torch.frombuffer(slot.buffer, dtype=torch.uint8) for slot in engine._client.slots()]
        assert views
        assert all(view.is_pinned() for view in views)
        train(model, optimizer, width)
        assert engine.boundary(1)
        engine.close(drain=False)

        assert not any(view.is_pinned() for view in views)

    def test_an_engine_restores_a_device_training_bit_for_bit(self):
        config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(slots=3, linger_s=5))

        def start():
            model, optimizer, width = make(width=256)
            return (model, optimizer, width), SnapshotEngine(config, {"model": model, "optimizer": optimizer})

        straight, _ = start()
        torch.manual_seed(1)
        for _ in range(5):
            train(*straight)

        parts, engine = start()
        torch.manual_seed(1)
        assert engine.wait_ready(TIMEOUT_S)
        for step in range(1, 4):
            train(*parts)
            torch.cuda.synchronize()
            assert engine.boundary(step)
        assert engine.wait(3, until="captured", timeout_s=TIMEOUT_S)
        engine.abandon()

        again, engine = start()
        snapshot = engine.restore("latest")
        for _ in range(2):
            train(*again)
        engine.close(drain=False)

        assert snapshot.step == 3
        for name, value in straight[0].state_dict().items():
            assert torch.equal(value, again[0].state_dict()[name]), name
