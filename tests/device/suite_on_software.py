"""What only the software device can do: fail an allocation, lose its streams, count the calls that wait for it.

Run by ``test_on_software_device.py`` with tests/gpu, on whose helpers it builds.
"""

import pytest
import torch
from gpu.test_device_capture import (
    DEVICE,
    TIMEOUT_S,
    bench,  # noqa: F401  a fixture
    engine_of,
    make,
    train,
)
from lightning import Trainer
from lightning.pytorch.plugins import MixedPrecision
from support import accelerator

from lazysnap.capture import device, devices
from lazysnap.capture.capture import CapturePhase
from lazysnap.errors import ConfigError, StateError
from lazysnap.integrations.lightning.strategies import state_of_rank
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.state.objects import ObjectState
from lazysnap.state.scalars import plain_numbers


def test_a_device_without_memory_for_a_capture_costs_that_capture_alone(bench, monkeypatch):  # noqa: F811
    """At each allocation of a capture in turn. Nothing of it is published, and its slot is not used too early."""
    monkeypatch.setattr(device, "STAGED_BYTES", 1 << 16)
    it, failed = bench(), 0
    turned = torch.nn.Parameter(torch.randn(600, 300, device=DEVICE).t())
    held = {"turned": turned.detach(), "averages": [torch.randn(200, 200 + i, device=DEVICE).t() for i in range(2)]}
    frozen = torch.nn.Linear(256, 256, device=DEVICE).requires_grad_(False)
    it.source = ObjectState({**it.source.named(), "sgd": torch.optim.SGD([turned]), "held": held, "frozen": frozen})
    for number in range(1, 50):
        it.plan = None  # the buffers are made anew each time
        job = it.prepared(number)
        accelerator.SOFTWARE.configure(seed=number, failing_allocation=number)
        try:
            with accelerator.busy_stream():
                try:
                    it.captures.begin(job)
                finally:  # nothing was queued if the staging buffers found no memory
                    assert not (job.device_copies and job.released.wait(0.05)), "released while a device may write"
        except torch.OutOfMemoryError:
            failed += 1
            assert it.captures.finish(TIMEOUT_S) is None
            train(*it.parts)  # goes on, behind whatever was queued
            assert it.captures.wait_released(TIMEOUT_S)
            assert not it.captures.is_writing(it.slot)
            assert (job.phase, it.slot.view().phase) == (CapturePhase.ABORTED, SlotPhase.EMPTY)
            continue
        it.captures.finish(TIMEOUT_S)
        it.check(job)
        break
    assert failed >= 4


def test_a_second_device_without_memory_for_the_first_capture_shows_its_error(bench):  # noqa: F811
    """At each allocation in turn: the second device may not have been come to."""
    failed = 0
    for number in range(1, 50):
        other, optimizer = make(device=f"{DEVICE}:1")
        train(other, optimizer)
        turned = torch.nn.Parameter(torch.randn(600, 300, device=DEVICE).t())  # is made dense while copies are queued
        others = {"other": other, "adam": optimizer, "sgd": torch.optim.SGD([turned])}
        it = bench(extra={"turned": turned.detach()}, others=others)
        job = it.prepared(number)
        accelerator.SOFTWARE.configure(seed=number, failing_allocation=number)
        try:
            it.captures.begin(job)
        except torch.OutOfMemoryError:
            failed += 1
            assert it.captures.finish(TIMEOUT_S) is None
            train(*it.parts)
            train(other, optimizer)
            assert it.captures.wait_released(TIMEOUT_S)
            assert (job.phase, it.slot.view().phase) == (CapturePhase.ABORTED, SlotPhase.EMPTY)
            job = it.begin(number + 1)
            it.captures.finish(TIMEOUT_S)
            it.check(job)
            continue
        it.captures.finish(TIMEOUT_S)
        it.check(job)
        break
    assert failed >= 4


def test_a_tensor_on_a_device_without_streams_is_refused_by_name(bench):  # noqa: F811
    devices.has_copier.cache_clear()
    accelerator.SOFTWARE.configure(has_streams=False)
    try:
        model, optimizer = make()
        engine = engine_of(model, optimizer)
        train(model, optimizer)
        with pytest.raises(StateError, match=rf"model\['0\.weight'\]: a tensor on the device {DEVICE}:0.*keep it out"):
            engine.boundary(1)
        engine.abandon()
    finally:
        accelerator.SOFTWARE.configure()
        devices.has_copier.cache_clear()


def test_boundary_and_gate_make_no_call_that_waits_for_the_device():
    model, optimizer = make()
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    engine = engine_of(model, optimizer, scaler=scaler)
    assert engine._wait_ready(TIMEOUT_S)
    calls = []
    for step in range(1, 6):
        scaler.scale(model(torch.randn(16, 256, device=DEVICE)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        engine._wait_ready(TIMEOUT_S)
        before = accelerator.SOFTWARE.synchronisations()
        assert engine.boundary(step)
        engine.gate()
        calls.append(accelerator.SOFTWARE.synchronisations() - before)
    engine.close(drain=False)

    assert calls[2:] == [0, 0, 0]  # the first ones plan


def test_threads_that_wait_for_a_device_neither_spin_nor_touch_another_device():
    """A rank whose device is not the first one: a call there would take memory of another rank's device."""
    software = accelerator.SOFTWARE
    torch.accelerator.set_device_index(1)
    try:
        model, optimizer = make(width=600)
        before, blocking = software.counters(), software.Event.blocking_waits
        engine = engine_of(model, optimizer)
        assert engine._wait_ready(TIMEOUT_S)
        for step in range(1, 4):
            train(model, optimizer)
            assert engine._wait_ready(TIMEOUT_S)
            assert engine.boundary(step)
        assert engine.wait(3, until="captured", timeout_s=TIMEOUT_S)
        engine.close(drain=False)
        after = software.counters()
    finally:
        torch.accelerator.set_device_index(0)

    waits = after["waits for an event"] - before.get("waits for an event", 0)
    assert waits == software.Event.blocking_waits - blocking > 0
    for kind in ("waits on another device than the event's", "stream synchronisations"):
        assert after.get(kind, 0) == before.get(kind, 0)


def test_a_reader_that_stops_in_the_middle_leaves_no_copy_that_reads_freed_memory(monkeypatch):
    monkeypatch.setattr(device, "CHUNK_BYTES", 1 << 10)
    vars(device._rings_of_thread).clear()
    tensor = torch.randn(1000, device=DEVICE)
    pieces = device.pieces_of(tensor, torch.accelerator.current_stream().record_event())
    next(pieces)
    pieces.close()
    vars(device._rings_of_thread).clear()
    del tensor  # the checker reports what reads it now


def test_the_scaler_of_a_lightning_trainer_is_read_without_waiting_for_the_device():
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(torch.ones(1, device=DEVICE))
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = Trainer(accelerator="cpu", plugins=[precision], logger=False, enable_checkpointing=False)
    before = accelerator.SOFTWARE.synchronisations()
    with state_of_rank(trainer):
        state = precision.state_dict()

    assert accelerator.SOFTWARE.synchronisations() == before
    assert plain_numbers(state) == precision.state_dict()


def test_a_step_captured_into_a_graph_needs_a_gate_before_each_replay_and_a_boundary_outside():
    model, optimizer = make()
    engine = engine_of(model, optimizer)
    assert engine._wait_ready(TIMEOUT_S)
    train(model, optimizer)
    assert engine.boundary(1)
    with accelerator.SOFTWARE.capturing_graph():
        with pytest.raises(ConfigError, match=r"captured into a graph.*engine\.wait.*engine\.gate\(\) before every"):
            optimizer.step()
        with pytest.raises(ConfigError, match="after replay"):
            engine.boundary(2)
    assert engine.wait(until="captured", timeout_s=TIMEOUT_S)
    with accelerator.SOFTWARE.capturing_graph():
        optimizer.step()  # nothing is copied: allowed, with one warning
    assert engine.boundary(2)
    engine.gate()
    engine.close(drain=False)
