"""A capture is whole and true, or it is not whole: copies into real slots, and everything that may disturb them."""

import resource
import threading

import pytest
import torch
from support.slots import trainer_slot

from lazysnap.capture.batches import SMALL_BYTES
from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.capture.captures import Captures
from lazysnap.capture.copier import SLICE_BYTES
from lazysnap.capture.dtypes import logical_facts, logical_name
from lazysnap.capture.plan import make_plan
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.memory.slots import TrainerSlot
from lazysnap.shard.layout import Layout
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

START = 0xABCD
TIMEOUT_S = 60


class WatchedSlot(TrainerSlot):
    """A slot that lets a test look, or hold the copy thread, each time bytes have landed."""

    landed = None

    def advance(self, watermark_bytes):
        super().advance(watermark_bytes)
        if self.landed is not None:
            self.landed(watermark_bytes)


class Hold:
    """Holds the copy thread behind its first tensor."""

    def __init__(self, slot):
        self.entered = threading.Event()
        self.go_on = threading.Event()
        slot.landed = self.hold

    def hold(self, watermark):
        self.entered.set()
        assert self.go_on.wait(TIMEOUT_S)


class Held(torch.nn.Module):
    """Parameters of any name, and a state_dict that keeps them as they are."""

    def __init__(self, tensors):
        super().__init__()
        self.held = {name: torch.nn.Parameter(value) for name, value in tensors.items()}

    def state_dict(self):
        return {name: value.detach() for name, value in self.held.items()}

    def load_state_dict(self, state, strict=True):
        for name, value in self.held.items():
            value.data.copy_(state[name])


class Bench:
    """Lazy tensors as parameters of an SGD, eager ones as plain values; one slot."""

    def __init__(self, lazy, eager=None):
        lazily = Held(lazy)
        self.parameters = lazily.held
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=1.0)
        self.source = ObjectState({"lazy": lazily, "optimizer": self.optimizer, "eager": eager or {}})
        self.captures = Captures()
        self.slot = None

    def job(self, step=1):
        walked = walk(self.source.collect())
        plan = make_plan(walked, self.source)
        if self.slot is None:
            self.slot = trainer_slot(1 << 16, plan.layout.size_bytes, WatchedSlot)
        capture = Capture(plan, self.slot, step, walked.tensors, sequence=step)
        self.slot.begin(START, step, sequence=step, image_bytes=plan.layout.size_bytes, meta=b"{}")
        return capture

    def held(self, job):
        return {name: job.plan.view(self.slot, index) for index, name in enumerate(job.plan.names)}


@pytest.fixture
def bench():
    made = []

    def make(lazy, eager=None):
        made.append(Bench(lazy, eager))
        return made[-1]

    yield make
    for item in made:
        item.captures.close(TIMEOUT_S)


def odd_tensors():
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(40, 60, generator=generator)
    return {
        "plain": base.clone(),
        "long": torch.randn(SLICE_BYTES // 4 * 2 + 7, generator=generator),
        "turned": base.t(),
        "strided": base[::2, ::3],
        "half": base.bfloat16(),
        "double": base.double(),
        "complex": torch.complex(base, base),
        "wide": torch.complex(base.double(), base.double()),
        "conjugate": torch.complex(base, base).conj(),
        "last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


def as_the_program_has_it(stored, name):
    dtype, _ = logical_facts(stored.dtype, tuple(stored.shape), name)
    if dtype is stored.dtype:
        return stored
    return torch.view_as_complex(stored) if dtype.is_complex else stored.view(dtype)


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_every_kind_of_tensor_arrives_bit_for_bit(bench, kind):
    tensors = odd_tensors()
    tensors |= {"fnuz": tensors["plain"].to(torch.float8_e4m3fnuz)}
    if kind == "eager":
        tensors |= {"bool": torch.tensor([True, False]), "byte": torch.arange(7, dtype=torch.uint8)}
        tensors |= {"f8": torch.randn(9).to(torch.float8_e4m3fn), "u16": torch.arange(5).to(torch.uint16)}
    it = bench(tensors if kind == "lazy" else {"one": torch.ones(1)}, tensors if kind == "eager" else None)
    job = it.job()

    it.captures.begin(job)
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.WHOLE
    assert it.slot.view().phase is SlotPhase.WHOLE
    held = it.held(job)
    for name, tensor in tensors.items():
        found = as_the_program_has_it(held[f"{kind}.{name}"], logical_name(tensor.dtype))
        assert found.dtype is tensor.dtype
        assert torch.equal(found, tensor), name
    size = job.plan.layout.size_bytes
    assert Layout.parse(it.slot.image[:size], size, "slot").specs == job.plan.layout.specs


def test_weights_that_were_made_in_inference_mode_are_captured(bench):
    """torch counts no writes to them, and raises where it is asked for their number."""
    with torch.inference_mode():
        weight = torch.arange(10.0)
    it = bench({"one": torch.ones(1)}, {"weight": weight})  # the weight itself, not what ``detach`` makes of it
    it.optimizer.add_param_group({"params": [weight]})
    for step in (1, 2):
        job = it.job(step)
        it.captures.begin(job)
        assert not it.captures.is_disturbed()
        it.captures.finish(TIMEOUT_S)

        assert job.phase is CapturePhase.WHOLE, job.reason
        assert torch.equal(it.held(job)["eager.weight"], torch.arange(10.0))


def test_eager_tensors_are_in_the_slot_when_begin_returns(bench):
    counter = torch.zeros(1000)
    it = bench({"one": torch.ones(1)}, {"counter": counter})
    job = it.job()

    it.captures.begin(job)
    counter.add_(1)  # as a forward pass does to a buffer
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.WHOLE
    assert torch.equal(it.held(job)["eager.counter"], torch.zeros(1000))


def test_a_tensor_that_changes_while_it_is_copied_discards_the_capture(bench):
    it = bench({"a": torch.zeros(10), "b": torch.zeros(10)})
    job = it.job()
    held = Hold(it.slot)

    it.captures.begin(job)
    assert held.entered.wait(TIMEOUT_S)
    with torch.no_grad():
        it.parameters["b"].add_(1)
    assert it.captures.is_disturbed()
    held.go_on.set()
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.TORN
    assert it.slot.view().phase is SlotPhase.EMPTY
    assert "lazy.b" in job.reason


def test_a_tensor_whose_memory_is_replaced_while_it_is_copied_discards_the_capture(bench):
    it = bench({"a": torch.zeros(10)})
    job = it.job()
    held = Hold(it.slot)

    it.captures.begin(job)
    assert held.entered.wait(TIMEOUT_S)
    job.sources[job.plan.names.index("lazy.a")].data = torch.ones(10)
    held.go_on.set()
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.TORN


def test_a_change_after_the_copy_does_not_matter(bench):
    it = bench({"a": torch.zeros(10)})
    job = it.job()
    it.captures.begin(job)
    assert job.released.wait(TIMEOUT_S)
    with torch.no_grad():
        it.parameters["a"].add_(1)

    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.WHOLE
    assert not it.captures.is_disturbed()


def test_a_copy_that_hangs_is_given_up_and_never_becomes_whole(bench):
    it = bench({"a": torch.zeros(10), "b": torch.zeros(10)})
    job = it.job()
    held = Hold(it.slot)
    it.captures.begin(job)
    assert held.entered.wait(TIMEOUT_S)

    assert it.captures.finish(0.01) is job

    assert job.phase is CapturePhase.FAILED
    assert not it.captures.wait_released(0.0)
    held.go_on.set()
    assert job.released.wait(TIMEOUT_S)
    assert it.captures.wait_released(0.0)
    assert (job.phase, it.slot.view().phase) == (CapturePhase.FAILED, SlotPhase.EMPTY)


def test_the_gate_returns_at_once_when_nothing_is_in_flight(bench):
    it = bench({"a": torch.zeros(10)})

    assert it.captures.finish(TIMEOUT_S) is None


def test_a_capture_whose_begin_fails_is_discarded_and_the_next_one_works(bench):
    it = bench({"a": torch.zeros(10)}, {"b": torch.ones(3)})
    job = it.job()
    job.sources[job.plan.names.index("eager.b")] = torch.ones(4)  # does not fit its place

    with pytest.raises(RuntimeError):
        it.captures.begin(job)

    assert it.slot.view().phase is SlotPhase.EMPTY
    assert it.captures.finish(0.0) is None
    again = it.job(step=2)
    it.captures.begin(again)
    it.captures.finish(TIMEOUT_S)
    assert again.phase is CapturePhase.WHOLE


def test_an_error_in_the_copy_thread_fails_that_capture_only(bench):
    it = bench({"a": torch.zeros(4, 4).t()})
    job = it.job()
    job.sources[job.plan.names.index("lazy.a")] = torch.zeros(5, 5).t()

    it.captures.begin(job)
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.FAILED
    assert it.slot.view().phase is SlotPhase.EMPTY
    again = it.job(step=2)
    it.captures.begin(again)
    it.captures.finish(TIMEOUT_S)
    assert again.phase is CapturePhase.WHOLE


def test_the_watermark_only_grows_and_ends_at_the_size(bench):
    it = bench({str(i): torch.full((SMALL_BYTES // 4 + 1 + i,), float(i)) for i in range(20)})
    job = it.job()
    seen = []

    def note(watermark):
        # What the watermark promises must be there, for persistence reads it right away.
        held = it.held(job)
        for record, source in zip(job.plan.records, job.sources, strict=True):
            if record.offset + record.nbytes <= watermark:
                assert torch.equal(held[record.name], source), record.name
        seen.append(watermark)

    it.slot.landed = note
    it.captures.begin(job)
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.WHOLE, job.reason
    assert len(seen) == 20
    assert seen == sorted(seen)
    assert it.slot.view().watermark_bytes == job.plan.layout.size_bytes


def test_the_header_is_written_once_while_only_this_process_captures_into_the_slot(bench):
    it = bench({"a": torch.ones(10)})
    for step in (1, 2, 3):
        job = it.job(step)
        header = job.plan.layout.header
        if step == 2:
            assert bytes(it.slot.image[: len(header)]) == header
            it.slot.image[:4] = b"left"  # shows that it is not written again
        if step == 3:
            it.captures.history[-1].slot.image[: len(header)] = header
        it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)
        assert job.phase is CapturePhase.WHOLE
        assert (bytes(it.slot.image[: len(header)]) == header) is (step != 2)


@pytest.mark.parametrize("writer", ["another", "aborted", "other plan", "returned"])
def test_the_header_is_written_again_after_anything_else_was_in_the_slot(bench, writer):
    it = bench({"a": torch.ones(10)}, {"b": torch.ones(3)})
    it.captures.begin(it.job(1))
    it.captures.finish(TIMEOUT_S)
    size_bytes = len(it.slot.image)
    if writer == "another":
        it.slot.begin(START, 2, sequence=2, image_bytes=size_bytes, meta=b"{}")
        it.slot.commit(copied_ns=0)
    elif writer == "aborted":
        job = it.job(2)
        job.sources[job.plan.names.index("eager.b")] = torch.ones(4)
        with pytest.raises(RuntimeError):
            it.captures.begin(job)
        assert it.captures.wait_released(TIMEOUT_S)
        it.captures.forget(it.slot)
    elif writer == "other plan":
        other = bench({"x": torch.ones(10)}, {"y": torch.ones(3)})
        other.slot = it.slot
        other.captures.begin(other.job(2))
        other.captures.finish(TIMEOUT_S)
    else:
        it.captures.forget(it.slot)
    it.slot.image[:4] = b"left"

    job = it.job(3)
    it.captures.begin(job)
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.WHOLE
    header = job.plan.layout.header
    assert bytes(it.slot.image[: len(header)]) == header


def test_a_slot_that_was_returned_and_unmapped_holds_no_capture(bench):
    it = bench({"a": torch.ones(10)})
    first = it.job(1)
    it.captures.begin(first)
    it.captures.finish(TIMEOUT_S)
    slot = it.slot
    it.captures.forget(slot)
    slot.close()
    it.slot = None

    job = it.job(2)
    it.captures.begin(job)
    it.captures.finish(TIMEOUT_S)

    assert first.slot_view() is None
    assert (first.phase, job.phase) == (CapturePhase.WHOLE, CapturePhase.WHOLE)
    assert it.captures.history == [job]


def many_small(kind):
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for number in range(1500):
        values = torch.randn(1 + number % 7, generator=generator)
        tensors[f"{kind} {number}"] = values.to([torch.float32, torch.bfloat16, torch.float64][number % 3])
    tensors[f"{kind} turned"] = torch.randn(3, 4, generator=generator).t()
    tensors[f"{kind} large"] = torch.randn(SMALL_BYTES, generator=generator)
    tensors[f"{kind} negative"] = torch.complex(torch.ones(2), torch.arange(2.0)).conj().imag[1:]
    return tensors


def limited_file_size():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_limited", [False, True])
def test_thousands_of_small_tensors_arrive_bit_for_bit(bench, is_limited):
    """Also where the process may write no file as large as the slot, which is what one system call does."""
    lazy = many_small("lazy")
    eager = many_small("eager") | {"scalars": [torch.tensor(float(number)) for number in range(1300)]}
    it = bench(lazy, eager)
    job = it.job()
    assert len(job.plan.lazy_batches) < 20
    lift = limited_file_size() if is_limited else lambda: None
    try:
        it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)
    finally:
        lift()

    assert job.phase is CapturePhase.WHOLE, job.reason
    held = it.held(job)
    for name, source in zip(job.plan.names, job.plan.records, strict=True):
        assert held[name].shape == source.stored_shape
    for name, tensor in lazy.items():
        assert torch.equal(held[f"lazy.{name}"], tensor), name
    for name, tensor in eager.items():
        if name != "scalars":
            assert torch.equal(held[f"eager.{name}"], tensor), name
    assert [held[f"eager.scalars.{number}"].item() for number in range(1300)] == list(range(1300))
