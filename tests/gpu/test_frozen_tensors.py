"""Frozen tensors on a device: copied into each slot once, and again only when they changed."""

import pytest
import torch
from gpu.test_device_capture import DEVICE, TIMEOUT_S, Bench
from support import accelerator
from support.slots import trainer_slot

from lazysnap.capture.capture import CapturePhase
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.state.objects import ObjectState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not accelerator.IS_THERE, reason=accelerator.WHY_NOT)]


def frozen_model():
    """A model without gradients: two tensors that are compared, and two that are too small for it."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.Linear(256, 128, dtype=torch.bfloat16))
    return model.to(DEVICE).requires_grad_(False)


@pytest.fixture
def fine_tuning():
    """A bench with a small model that is trained, and a frozen one."""
    frozen = frozen_model()
    bench = Bench(others={"frozen": frozen})
    bench.frozen = frozen
    yield bench
    bench.captures.close(TIMEOUT_S)


def captured(bench, step):
    job = bench.begin(step)
    bench.captures.finish(TIMEOUT_S)
    assert bench.captures.wait_released(TIMEOUT_S)
    return job


def image_of(bench, job, name):
    index = next(index for index, record in enumerate(job.plan.records) if record.name == name)
    return job.plan.view(bench.slot, index)


def test_a_slot_gets_the_bytes_of_frozen_tensors_once(fine_tuning):
    job = captured(fine_tuning, 1)
    fine_tuning.check(job)
    large, small = (image_of(fine_tuning, job, name) for name in ("frozen.0.weight", "frozen.0.bias"))
    large.fill_(7)
    small.fill_(7)

    job = captured(fine_tuning, 2)

    assert job.phase is CapturePhase.WHOLE
    assert bool((large == 7).all()), "it was copied again"
    assert torch.equal(small, fine_tuning.frozen[0].bias.cpu())


def test_each_slot_gets_them(fine_tuning):
    first = captured(fine_tuning, 1)
    fine_tuning.check(first)
    slots = [fine_tuning.slot, trainer_slot(1 << 16, first.plan.layout.size_bytes, type(fine_tuning.slot))]
    for step in range(2, 6):
        fine_tuning.slot = slots[step % 2]
        fine_tuning.check(captured(fine_tuning, step))


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_change_that_leaves_a_trace_is_captured(fine_tuning, how):
    captured(fine_tuning, 1)
    weight = fine_tuning.frozen[0].weight
    with torch.no_grad():
        if how == "written":
            weight.add_(1)
        else:
            weight.data = weight + 1

    fine_tuning.check(captured(fine_tuning, 2))


def test_a_change_without_a_trace_drops_the_capture_and_from_then_on_the_tensor_is_copied(fine_tuning):
    captured(fine_tuning, 1)
    fine_tuning.frozen[0].weight.data.add_(1)

    dropped = captured(fine_tuning, 2)
    assert dropped.phase is CapturePhase.FAILED
    assert "frozen weights were written to without a trace" in dropped.reason
    assert "(1: frozen.0.weight)" in dropped.reason
    assert fine_tuning.slot.view().phase is SlotPhase.EMPTY

    for step in range(3, 6):
        fine_tuning.check(captured(fine_tuning, step))
        fine_tuning.frozen[0].weight.data.mul_(0.5)


def test_the_result_of_the_comparison_is_waited_for(fine_tuning):
    """Nothing else of this state is on the device, so nothing else waits for it."""
    weight = torch.nn.Parameter(torch.randn(256, 256, device=DEVICE), requires_grad=False)
    fine_tuning.source = ObjectState({"frozen": torch.nn.ParameterList([weight]), "cpu": torch.nn.Linear(4, 4)})
    captured(fine_tuning, 1)
    for step in range(2, 6):
        is_changed = step == 5
        if is_changed:
            weight.data.add_(1)
        job = fine_tuning.prepared(step)
        with accelerator.busy_stream():  # the device is later than the copy thread
            fine_tuning.captures.begin(job)
            assert job.cpu_sources_read.wait(TIMEOUT_S)
            assert not job.released.wait(0.05)
        fine_tuning.captures.finish(TIMEOUT_S)
        assert fine_tuning.captures.wait_released(TIMEOUT_S)
        assert job.phase is (CapturePhase.FAILED if is_changed else CapturePhase.WHOLE)


@pytest.mark.parametrize("element", [0, 12_345, -1])
def test_one_element_is_enough(fine_tuning, element):
    captured(fine_tuning, 1)
    fine_tuning.frozen[1].weight.data.view(-1)[element] += 0.5

    assert captured(fine_tuning, 2).phase is CapturePhase.FAILED


def test_rows_and_columns_that_changed_places_are_found(fine_tuning):
    """The sum of all words is the same then, and that of some rows or columns."""
    captured(fine_tuning, 1)
    weight = fine_tuning.frozen[0].weight.data
    weight.copy_(weight.roll(128, 0))
    assert captured(fine_tuning, 2).phase is CapturePhase.FAILED

    wide = torch.nn.Parameter(torch.randn(64, 1024, device=DEVICE), requires_grad=False)
    bench = Bench(others={"frozen": torch.nn.ParameterList([wide])})
    try:
        captured(bench, 1)
        wide.data.copy_(wide.data.roll(7, 1))
        assert captured(bench, 2).phase is CapturePhase.FAILED
    finally:
        bench.captures.close(TIMEOUT_S)


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float64, "negated"),
        (torch.float32, "negated"),
        (torch.bfloat16, "doubled"),
        (torch.int64, "doubled"),
        (torch.int64, "one more"),
        (torch.uint8, "one more"),
    ],
)
def test_the_same_change_of_all_elements_does_not_cancel_out(dtype, change):
    """As it would in sums of 64-bit words, which overflow: 8,192 times the sign bit is nothing there."""
    weight = torch.arange(1, 32_769, device=DEVICE).remainder(100).to(dtype)
    weight = weight.repeat(4) + (1 if dtype is torch.uint8 else 0)
    frozen = torch.nn.ParameterList([torch.nn.Parameter(weight, requires_grad=False)])
    bench = Bench(others={"frozen": frozen})
    try:
        captured(bench, 1)
        if change == "doubled":
            frozen[0].data.mul_(2)
        elif change == "negated":
            frozen[0].data.neg_()
        else:
            frozen[0].data.add_(1)
        assert captured(bench, 2).phase is CapturePhase.FAILED
    finally:
        bench.captures.close(TIMEOUT_S)


@pytest.mark.parametrize("seed", range(4))
def test_what_changes_behind_the_boundary_is_no_part_of_it(fine_tuning, seed):
    """Adapters that are merged for an evaluation right behind the boundary, and taken out again."""
    if accelerator.SOFTWARE is not None:
        accelerator.SOFTWARE.configure(seed=seed)
    captured(fine_tuning, 1)
    for step in range(2, 5):
        job = fine_tuning.begin(step)
        for weight in fine_tuning.frozen.parameters():
            weight.data.neg_()
        fine_tuning.captures.finish(TIMEOUT_S)
        for weight in fine_tuning.frozen.parameters():
            weight.data.neg_()
        assert fine_tuning.captures.wait_released(TIMEOUT_S)
        assert job.phase is CapturePhase.WHOLE, job.reason


def test_a_capture_that_was_dropped_leaves_nothing_to_rely_on(fine_tuning):
    captured(fine_tuning, 1)
    for step in range(2, 100):
        job = fine_tuning.begin(step)
        job.drop(CapturePhase.FAILED, "for the test")
        fine_tuning.captures.finish(TIMEOUT_S)
        assert fine_tuning.captures.wait_released(TIMEOUT_S)
        if job.phase is CapturePhase.FAILED:
            break  # else the copy was quicker
    assert job.phase is CapturePhase.FAILED
    image_of(fine_tuning, job, "frozen.0.weight").fill_(7)

    fine_tuning.check(captured(fine_tuning, step + 1))


def test_a_tensor_of_which_torch_counts_no_writes_is_compared_all_the_same():
    with torch.inference_mode():
        weight = torch.randn(256, 256, device=DEVICE)
    bench = Bench(others={"frozen": torch.nn.ParameterList([torch.nn.Parameter(weight, requires_grad=False)])})
    try:
        assert captured(bench, 1).phase is CapturePhase.WHOLE
        assert captured(bench, 2).phase is CapturePhase.WHOLE
        with torch.inference_mode():
            weight.add_(1)
        assert captured(bench, 3).phase is CapturePhase.FAILED
    finally:
        bench.captures.close(TIMEOUT_S)


def test_frozen_tensors_that_an_optimizer_holds_are_copied_once_too():
    frozen = frozen_model()
    bench = Bench(others={"frozen": frozen, "adam": torch.optim.SGD(frozen.parameters())})
    try:
        job = captured(bench, 1)
        image_of(bench, job, "frozen.0.weight").fill_(7)
        job = captured(bench, 2)
        assert bool((image_of(bench, job, "frozen.0.weight") == 7).all())
    finally:
        bench.captures.close(TIMEOUT_S)
