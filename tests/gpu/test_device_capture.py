"""Captures from a device: true to the boundary while the next step runs, whole only when every byte has landed."""

import uuid

import pytest
import torch
from support import accelerator
from support.slots import trainer_slot

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine
from lazysnap.capture import device
from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.capture.captures import Captures
from lazysnap.capture.plan import make_plan, optimizer_signature
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.memory.slots import TrainerSlot
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not accelerator.IS_THERE, reason=accelerator.WHY_NOT)]
TIMEOUT_S = 30
DEVICE = accelerator.TYPE


def make(width=256, device=DEVICE):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width, dtype=torch.float32)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer


def train(model, optimizer):
    width, device = model[0].in_features, model[0].weight.device
    model(torch.randn(16, width, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class ReadSlot(TrainerSlot):
    """A slot that is read as a keeper reads it: whatever the watermark covers, as soon as it does."""

    expected = None
    checked_bytes = 0

    def begin(self, *args, **options):
        self.checked_bytes = 0
        super().begin(*args, **options)

    def advance(self, watermark_bytes):
        super().advance(watermark_bytes)
        if self.expected is not None:
            self.expected.check(self.checked_bytes, watermark_bytes)
        self.checked_bytes = watermark_bytes

    def commit(self, *, copied_ns):
        self.advance(self.view().image_bytes)
        super().commit(copied_ns=copied_ns)


class Expected:
    """The state at a boundary, copied aside, and where it is to be found in the slot."""

    def __init__(self, walked, plan, slot):
        torch.accelerator.synchronize()
        self.plan, self.slot, self.wrong = plan, slot, []
        self.values = [tensor.cpu().clone() for tensor in walked.tensors]

    def check(self, begin, end):
        for index, record in enumerate(self.plan.records):
            if begin < record.offset + record.nbytes <= end:
                view = self.plan.view(self.slot, index)
                accelerator.host_reads(view, "a read below the watermark")
                stored = self.values[index].resolve_conj()
                if not torch.equal(view, stored):
                    self.wrong.append(record.name)


class Bench:
    def __init__(self, extra=None, others=()):
        self.parts = make()
        train(*self.parts)
        self.source = ObjectState(
            {"model": self.parts[0], "optimizer": self.parts[1], "extra": extra or {}, **dict(others)}
        )
        self.captures = Captures()
        self.plan = None
        self.slot = None

    def prepared(self, step=1):
        walked = walk(self.source.collect())
        if self.plan is None or self.plan.mismatch(walked, optimizer_signature(self.source)):
            self.plan = make_plan(walked, self.source)
        plan = self.plan
        if self.slot is None:
            self.slot = trainer_slot(1 << 16, plan.layout.size_bytes, ReadSlot)
            self.slot.populate()
        self.slot.expected = Expected(walked, plan, self.slot)
        capture = Capture(plan, self.slot, step, walked.tensors, sequence=step)
        self.slot.begin(1, step, sequence=step, image_bytes=plan.layout.size_bytes, meta=b"{}")
        return capture

    def begin(self, step=1):
        job = self.prepared(step)
        self.captures.begin(job)
        return job

    def check(self, job):
        assert self.captures.wait_released(TIMEOUT_S)
        view = self.slot.view()
        assert view.phase is SlotPhase.WHOLE, job.reason
        assert view.watermark_bytes == job.plan.layout.size_bytes
        assert self.slot.expected.wrong == []


@pytest.fixture
def bench():
    made = []

    def make_bench(*args, **options):
        made.append(Bench(*args, **options))
        return made[-1]

    yield make_bench
    for item in made:
        item.captures.close(TIMEOUT_S)


def engine_of(model, optimizer, **others):
    config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=5))
    return SnapshotEngine(config, {"model": model, "optimizer": optimizer, **others})


def test_the_capture_is_of_the_boundary_though_the_next_step_is_queued_at_once(bench):
    it = bench()
    for step in range(1, 6):
        job = it.begin(step)
        it.captures.finish(TIMEOUT_S)
        train(*it.parts)
        it.check(job)


@pytest.mark.parametrize("seed", range(8))
def test_in_any_schedule_what_stands_below_the_watermark_is_the_state_of_the_boundary(bench, seed):
    """The software device draws the order of work anew for each seed."""
    if accelerator.SOFTWARE is not None:
        accelerator.SOFTWARE.configure(seed=seed)
    slow = torch.nn.Linear(64, 64)
    it = bench(extra={"counts": torch.arange(100)}, others={"cpu": slow, "sgd": torch.optim.SGD(slow.parameters())})
    for step in range(1, 4):
        job = it.begin(step)
        it.captures.finish(TIMEOUT_S)
        train(*it.parts)
        with torch.no_grad():
            slow.weight.add_(1)
        it.check(job)


def test_buffers_that_change_in_the_next_forward_are_captured_as_they_were(bench):
    it = bench()
    job = it.begin()
    with torch.no_grad():
        it.parts[0](torch.randn(64, 256, device=DEVICE))  # forward before the gate: running statistics change
    it.captures.finish(TIMEOUT_S)

    it.check(job)


def test_the_watermark_covers_no_byte_of_a_device_that_has_not_landed(bench):
    """A state on a CPU and on a device: bytes of both lie one behind the other in the file."""
    slow = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    it = bench(others={"cpu": slow, "sgd": torch.optim.SGD(slow.parameters(), lr=1.0)})
    job = it.prepared()
    of_device = min(record.offset for record in job.plan.records if record.device.type == DEVICE and record.nbytes)

    with accelerator.busy_stream():
        it.captures.begin(job)
        assert job.cpu_sources_read.wait(TIMEOUT_S)
        assert it.slot.view().watermark_bytes <= of_device
        it.captures.finish(TIMEOUT_S)

    it.check(job)


def test_the_gate_of_a_state_on_both_waits_for_what_is_read_from_the_cpu_alone(bench):
    slow = torch.nn.Linear(4096, 4096)  # is not read in a moment
    it = bench(others={"cpu": slow, "sgd": torch.optim.SGD(slow.parameters(), lr=1.0)})
    job = it.prepared()

    with accelerator.busy_stream():
        it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)
        assert job.cpu_sources_read.is_set()
        with torch.no_grad():
            slow.weight.add_(1)  # as an optimizer behind the gate does
        assert job.phase is CapturePhase.COPYING

    it.check(job)


def test_a_large_average_of_the_weights_takes_no_second_place_on_the_device(bench, monkeypatch, caplog):
    """Which no optimizer holds: it is copied before it can change, though nobody waits for that on the host."""
    monkeypatch.setattr(device, "STAGED_BYTES", 1 << 20)
    average = [torch.randn(512, 512, device=DEVICE) for _ in range(8)]
    it = bench(extra={"average": average, "counts": torch.ones(100, device=DEVICE)})
    of_weights = sum(tensor.nbytes for tensor in (*it.parts[0].parameters(), *it.parts[0].buffers()))
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    for step in range(1, 4):
        job = it.begin(step)
        torch._foreach_mul_(average, 0.5)  # before the gate
        it.captures.finish(TIMEOUT_S)
        it.check(job)
    peak = torch.accelerator.max_memory_allocated()

    assert peak - before < device.STAGED_BYTES + 3 * of_weights < sum(tensor.nbytes for tensor in average)
    said = [record for record in caplog.records if "no optimizer holds" in record.message]
    assert len(said) == 1
    assert "extra['average'][" in said[0].message or "extra.average." in said[0].message


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
def test_two_devices_in_one_state(bench):
    other, optimizer = make(device=f"{DEVICE}:1")
    train(other, optimizer)
    it = bench(others={"other": other, "adam": optimizer})
    for step in range(1, 4):
        job = it.begin(step)
        it.captures.finish(TIMEOUT_S)
        train(*it.parts)
        train(other, optimizer)
        it.check(job)


def test_a_tensor_that_changes_before_the_gate_discards_the_capture(bench):
    it = bench()
    job = it.prepared()
    with accelerator.busy_stream():
        it.captures.begin(job)
        torch._C._autograd._unsafe_set_version_counter((it.parts[0][0].weight,), (99,))  # without a write that races
        it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.TORN
    assert it.captures.wait_released(TIMEOUT_S)
    assert it.slot.view().phase is SlotPhase.EMPTY


def test_a_change_behind_the_gate_does_not_matter_though_the_device_still_copies(bench):
    it = bench()
    job = it.prepared()
    with accelerator.busy_stream():
        it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)
        with torch.no_grad():
            it.parts[0][0].weight.add_(1)
        assert job.phase is CapturePhase.COPYING

    it.check(job)
    assert it.captures.take_ended() == [job]


def test_strided_complex_and_odd_tensors_on_the_device(bench):
    base = torch.randn(64, 48, device=DEVICE)
    extra = {
        "turned": base.t(),
        "strided": base[::2, ::3],
        "half": base.bfloat16(),
        "complex": torch.complex(base, base),
        "bool": base > 0,
        "empty": base[:0],
        "f8": base.to(torch.float8_e4m3fn),
        "one": torch.ones((), device=DEVICE),
    }
    if accelerator.SOFTWARE is None:  # which cannot conjugate
        extra["conjugate"] = torch.complex(base, base).conj()
    it = bench(extra=extra)
    job = it.begin()
    it.captures.finish(TIMEOUT_S)

    it.check(job)


def test_neither_boundary_nor_gate_waits_for_the_device(bench):
    it = bench()
    it.begin()
    it.captures.finish(TIMEOUT_S)
    assert it.captures.wait_released(TIMEOUT_S)  # the slot is registered, the staging buffers are there
    stream = torch.accelerator.current_stream()
    job = it.prepared(2)

    with accelerator.busy_stream():
        it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)

        assert not stream.query(), "the host waited until the device was done"
        assert it.slot.view().phase is SlotPhase.CAPTURING
        assert it.captures.is_writing(it.slot)

    it.check(job)
    assert not it.captures.is_writing(it.slot)


def test_a_gate_behind_the_next_one_waits_until_the_capture_is_whole(bench):
    """So when a rank begins a capture, its last one is whole: the number of slots counts on that."""
    it = bench()
    job = it.prepared()
    with accelerator.busy_stream():
        it.captures.begin(job)
        assert it.captures.finish(TIMEOUT_S) is job
        assert job.phase is CapturePhase.COPYING

    assert it.captures.finish(TIMEOUT_S) is None

    assert job.phase is CapturePhase.WHOLE


def test_a_device_that_does_not_finish_costs_the_snapshot_and_no_more_than_one_wait(bench):
    it = bench()
    job = it.prepared()
    with accelerator.busy_stream():
        it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)

        assert not it.captures.wait_released(0.01)

        assert job.phase is CapturePhase.FAILED
        assert it.slot.view().phase is SlotPhase.EMPTY
        assert it.captures.is_writing(it.slot)
    assert job.released.wait(TIMEOUT_S)
    assert it.captures.wait_released(0.0)
    assert it.slot.view().phase is SlotPhase.EMPTY


def test_giving_up_a_capture_that_is_whole_changes_nothing(bench):
    it = bench()
    job = it.begin()
    it.captures.finish(TIMEOUT_S)
    assert it.captures.wait_released(TIMEOUT_S)

    assert not job.drop(CapturePhase.FAILED, "too late")

    it.check(job)


def test_the_scale_and_the_growth_of_a_grad_scaler_are_restored():
    config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=30), verify_restart=False)

    def start():
        model, optimizer = make()
        scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=4)
        return model, optimizer, scaler

    model, optimizer, scaler = start()
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer, "scaler": scaler})
    for step in range(1, 7):
        scaler.scale(model(torch.randn(16, 256, device=DEVICE)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert engine._wait_ready(TIMEOUT_S)
        assert engine.boundary(step)
    assert engine.wait(6, until="captured", timeout_s=TIMEOUT_S)
    engine.abandon()

    model, optimizer, again = start()
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer, "scaler": again})
    assert engine.restore().step == 6
    engine.close(drain=False)

    assert again.state_dict() == scaler.state_dict()
    assert again.state_dict()["scale"] == 16.0
    assert type(again.state_dict()["_growth_tracker"]) is int


def test_figures_say_how_long_copies_took_and_devices_waited():
    model, optimizer = make(width=1024)
    engine = engine_of(model, optimizer)
    assert engine._wait_ready(TIMEOUT_S)
    for step in range(1, 5):
        train(model, optimizer)
        assert engine._wait_ready(TIMEOUT_S)
        assert engine.boundary(step)
        engine.gate()  # at once: the device has to wait for nearly the whole copy
    assert engine.wait(4, until="captured", timeout_s=TIMEOUT_S)
    torch.accelerator.synchronize()
    statistics = engine.statistics()
    engine.close(drain=False)

    assert (statistics.whole, statistics.copy.count) == (4, 4)
    assert statistics.copy.total_s > 0
    assert statistics.device_wait_s > 0


def test_slots_are_registered_before_they_are_ready_and_not_after_the_end():
    model, optimizer = make()
    engine = engine_of(model, optimizer)
    assert engine._wait_ready(TIMEOUT_S)
    views = [torch.frombuffer(slot.image, dtype=torch.uint8) for slot in engine._client.slots()]
    assert views
    assert all(view.is_pinned() for view in views)
    train(model, optimizer)
    assert engine.boundary(1)
    engine.close(drain=False)

    assert not any(view.is_pinned() for view in views)


def test_an_engine_restores_a_device_training_bit_for_bit():
    """Batches are drawn on the device: its random numbers are part of the state."""
    config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=30), verify_restart=False)

    def start():
        model, optimizer = make()
        return (model, optimizer), SnapshotEngine(config, {"model": model, "optimizer": optimizer})

    straight = make()
    torch.manual_seed(1)
    for _ in range(5):
        train(*straight)

    parts, engine = start()
    torch.manual_seed(1)
    for step in range(1, 4):
        train(*parts)
        assert engine._wait_ready(TIMEOUT_S)
        assert engine.boundary(step)
    assert engine.wait(3, until="captured", timeout_s=TIMEOUT_S)
    engine.abandon()

    again, engine = start()
    torch.manual_seed(7)
    snapshot = engine.restore("latest")
    for _ in range(2):
        train(*again)
    engine.close(drain=False)

    assert snapshot.step == 3
    for name, value in straight[0].state_dict().items():
        assert torch.equal(value, again[0].state_dict()[name]), name
