"""Captures on a device that cannot page-lock a slot: copies go through a ring of page-locked buffers.

Run by ``test_on_software_device.py``. The tests are those of tests/gpu, on such a device.
"""

import contextlib

import pytest
import torch
from gpu.test_device_capture import (  # noqa: F401  tests and a fixture
    DEVICE,
    TIMEOUT_S,
    bench,
    test_an_engine_restores_a_device_training_bit_for_bit,
    test_buffers_that_change_in_the_next_forward_are_captured_as_they_were,
    test_figures_say_how_long_copies_took_and_devices_waited,
    test_in_any_schedule_what_stands_below_the_watermark_is_the_state_of_the_boundary,
    test_strided_complex_and_odd_tensors_on_the_device,
    test_the_capture_is_of_the_boundary_though_the_next_step_is_queued_at_once,
    test_two_devices_in_one_state,
    train,
)
from support import accelerator

from lazysnap.capture import device
from lazysnap.capture.capture import CapturePhase
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.state.objects import ObjectState


@pytest.fixture(autouse=True)
def _cannot_page_lock_and_has_small_buffers(monkeypatch):
    monkeypatch.setattr(device, "CHUNK_BYTES", 40_000)  # several pieces, and the last one smaller
    vars(device._rings_of_thread).clear()
    with accelerator.SOFTWARE.without_page_locking():
        yield
    vars(device._rings_of_thread).clear()


def test_the_boundary_does_not_wait_for_the_device_and_the_gate_does(bench):  # noqa: F811
    it, lets_go = bench(), []
    job = it.prepared()
    advance = it.slot.advance
    it.slot.advance = lambda end: (lets_go.append(job.cpu_sources_read.is_set()), advance(end))
    waits = accelerator.SOFTWARE.synchronisations()
    with accelerator.busy_stream():
        it.captures.begin(job)
        assert accelerator.SOFTWARE.synchronisations() == waits
    it.captures.finish(TIMEOUT_S)

    assert job.phase is CapturePhase.WHOLE
    it.check(job)
    assert lets_go
    assert not any(lets_go), "the gate need not have waited for all pieces"


def test_large_eager_tensors_are_copied_before_control_returns(bench, monkeypatch):  # noqa: F811
    monkeypatch.setattr(device, "STAGED_BYTES", 1 << 16)
    average = torch.randn(300, 300, device=DEVICE)
    it = bench(extra={"average": average, "turned": torch.randn(600, 100, device=DEVICE).t()})
    for step in range(1, 3):
        job = it.begin(step)
        average.mul_(0.5)
        it.captures.finish(TIMEOUT_S)
        train(*it.parts)
        it.check(job)


def test_a_device_without_memory_for_a_capture_costs_that_capture_alone(bench):  # noqa: F811
    """At each allocation in turn: of the staging buffers, and on the copy thread of a dense copy."""
    it, failed = bench(), 0
    turned = torch.nn.Parameter(torch.randn(600, 300, device=DEVICE).t())
    it.source = ObjectState(
        {**it.source.named(), "sgd": torch.optim.SGD([turned]), "held": {"turned": turned.detach()}}
    )
    for number in range(1, 50):
        job = it.prepared(number)
        accelerator.SOFTWARE.configure(seed=number, failing_allocation=number)
        with contextlib.suppress(torch.OutOfMemoryError):
            it.captures.begin(job)
        it.captures.finish(TIMEOUT_S)
        accelerator.SOFTWARE.configure()
        train(*it.parts)
        assert it.captures.wait_released(TIMEOUT_S)
        if job.phase is CapturePhase.WHOLE:
            it.check(job)
            break
        failed += 1
        accelerator.SOFTWARE.races()  # no gate waits for what a capture that failed had staged: nobody uses that
        assert job.is_dropped
        assert it.slot.view().phase is SlotPhase.EMPTY
    assert failed >= 2


def test_a_tensor_that_changes_before_the_gate_discards_the_capture(bench):  # noqa: F811
    it = bench()
    job = it.begin()
    torch._C._autograd._unsafe_set_version_counter((it.parts[0][0].weight,), (99,))  # without a write that races
    it.captures.finish(TIMEOUT_S)

    assert (job.phase, it.slot.view().phase) == (CapturePhase.TORN, SlotPhase.EMPTY)


def test_a_device_that_does_not_finish_costs_the_snapshot(bench):  # noqa: F811
    it = bench()
    job = it.prepared()
    with accelerator.busy_stream():
        it.captures.begin(job)
        it.captures.finish(0.01)
        assert (job.phase, it.slot.view().phase) == (CapturePhase.FAILED, SlotPhase.EMPTY)
        assert it.captures.is_writing(it.slot)
    assert job.released.wait(TIMEOUT_S)
    assert it.slot.view().phase is SlotPhase.EMPTY
