"""What an engine promises a plain training loop."""

import gc
import signal
import threading
import time

import numpy as np
import pytest
import torch
from small_training import TIMEOUT_S, Training, end
from support.waiting import until

from lazysnap import SnapshotConfig, SnapshotEngine, register_type
from lazysnap.capture.capture import Capture
from lazysnap.errors import ConfigError, JobBusy, StateError


@pytest.fixture
def expected(job):
    """The facts after 6 uninterrupted steps without any snapshot."""
    training = Training(job.config())
    for _ in range(6):
        training.train()
    return training.facts()


def test_a_restart_from_memory_continues_bit_for_bit(job, expected):
    first = job.start()
    first.run(1, 4)
    assert first.began == [True] * 4
    job.crash(first)

    second = job.start(ready=False)
    snapshot = second.engine.restore("latest")
    second.engine._wait_ready(TIMEOUT_S)
    second.run(5, 6)

    assert (snapshot.step, snapshot.level) == (4, "memory")
    assert second.facts() == expected


def test_a_restart_from_storage_continues_bit_for_bit(job, expected, tmp_path):
    first = job.start(tmp_path)
    first.run(1, 4)
    end(first)

    second = job.start(tmp_path, ready=False)
    snapshot = second.engine.restore("latest")
    second.engine._wait_ready(TIMEOUT_S)
    second.run(5, 6)

    assert (snapshot.step, snapshot.level) == (4, str(tmp_path))
    assert second.facts() == expected
    assert snapshot.run_id == second.engine._fetch("latest").run_id


def test_captures_do_not_change_the_training(job, expected):
    training = job.start()
    training.run(1, 6)

    assert training.facts() == expected


@pytest.mark.slow
def test_what_follows_the_boundary_does_not_reach_the_snapshot(job):
    training = job.start()
    training.run(1, 2)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    seen = training.counters["seen"]
    training.engine.boundary(3)
    for _ in range(3):
        training.train()

    held = training.engine._fetch("latest")

    assert held.step == 3
    assert held.state["counters"] == {"seen": seen}
    for name, value in before.items():
        assert torch.equal(held.state["model"][name], value), name


@pytest.mark.slow
def test_a_restored_state_shares_no_memory_with_the_slots(job):
    training = job.start()
    training.run(1, 1)
    held = training.engine._fetch("latest")
    copy = held.state["model"]["0.weight"].clone()

    training.run(2, 8)

    assert torch.equal(held.state["model"]["0.weight"], copy)


@pytest.mark.slow
def test_a_boundary_in_inference_mode_costs_no_later_capture(job):
    training = job.start()
    training.run(1, 1)  # from here on the plan stays
    with torch.inference_mode():
        assert training.engine.boundary(2)

    for step in range(3, 10):
        training.run(step, step)
        assert training.engine.wait(step, until="captured", timeout_s=TIMEOUT_S)


def test_a_restore_right_behind_a_boundary_waits_for_its_copy(job):
    large = {"weights": torch.zeros(1 << 25)}
    training = job.start(extra={"large": torch.nn.ParameterDict(large)}, verify_restart=False)
    training.optimizer.add_param_group({"params": list(training.engine._source.named()["large"].parameters())})
    training.run(1, 1)
    assert training.engine._wait_ready(TIMEOUT_S)
    assert training.engine.boundary(2)

    assert training.engine.restore("latest").step == 2
    assert training.engine.statistics().torn == 0


def test_captures_are_made_every_n_steps(job):
    training = job.start(every_n_steps=3)
    training.run(1, 8)

    assert training.began == [True, False, True, False, False, True, False, False]


@pytest.mark.slow
def test_statistics_tell_what_happened(job, tmp_path):
    training = job.start(tmp_path)
    training.run(1, 4)
    assert training.engine.wait(4, until="durable", timeout_s=TIMEOUT_S)

    statistics = training.engine.statistics()

    assert (statistics.began, statistics.whole, statistics.torn, statistics.failed) == (4, 4, 0, 0)
    assert statistics.last_whole_step == 4
    assert statistics.last_durable_step == {str(tmp_path): 4}
    assert statistics.persisted[str(tmp_path)] >= 1
    assert statistics.shard_bytes > 0
    assert statistics.boundary.count == statistics.gate.count == statistics.copy.count == 4


@pytest.mark.slow
def test_statistics_that_a_program_holds_do_not_change(job, tmp_path):
    training = job.start(tmp_path)
    training.run(1, 2)
    assert training.engine.wait(2, until="durable", timeout_s=TIMEOUT_S)
    earlier = training.engine.statistics()

    training.run(3, 4)
    assert training.engine.wait(4, until="durable", timeout_s=TIMEOUT_S)
    later = training.engine.statistics()

    assert (earlier.began, earlier.whole, earlier.last_durable_step) == (2, 2, {str(tmp_path): 2})
    assert earlier.boundary.count == earlier.gate.count == 2
    assert (later.began, later.whole, later.last_durable_step) == (4, 4, {str(tmp_path): 4})


@pytest.mark.slow
def test_waiting_tells_captured_from_dropped(job):
    training = job.start()
    training.run(1, 2)

    assert training.engine.wait(2, until="captured", timeout_s=TIMEOUT_S)
    assert not training.engine.wait(7, until="captured", timeout_s=TIMEOUT_S)
    with pytest.raises(ConfigError, match="no persistent level"):
        training.engine.wait(2, until="durable", timeout_s=1)


def test_who_waits_for_a_copy_waits_no_longer_than_asked_and_costs_no_capture(job, monkeypatch):
    training = job.start(io_timeout_s=3600.0)  # longer than this test may take
    is_let_go = threading.Event()
    commit = Capture.commit
    monkeypatch.setattr(Capture, "commit", lambda capture: is_let_go.wait(TIMEOUT_S) and commit(capture))
    training.train()
    assert training.engine.boundary(1)

    assert not training.engine.wait(until="captured", timeout_s=0.05)

    is_let_go.set()
    assert training.engine.wait(until="captured", timeout_s=TIMEOUT_S)
    assert training.engine.statistics().whole == 1


def test_a_step_whose_memory_has_a_later_one_by_now_counts_as_captured(job):
    training = job.start()
    training.run(1, 9)

    assert training.engine.wait(1, until="captured", timeout_s=TIMEOUT_S)


@pytest.mark.slow
def test_a_step_beside_the_copy_drops_that_snapshot_and_the_next_is_whole(job):
    training = job.start()
    big = torch.nn.Parameter(torch.zeros(4_000_000))
    training.optimizer.add_param_group({"params": [big]})
    for _ in range(2):  # the state grew: other slots are made for it
        big.grad = torch.ones_like(big)
        training.train()
        training.engine.boundary(1)
        assert training.engine._wait_ready(TIMEOUT_S)
    step = 2
    while not training.engine.boundary(step):
        step += 1
    training.engine.gate()
    whole = training.engine.statistics().whole
    training.engine._boundaries.gates.remove()
    training.engine.boundary(step + 1)
    with torch.no_grad():
        big.add_(1)

    training.engine.gate()

    statistics = training.engine.statistics()
    # The copy of 48 MB may have won the race; then the snapshot is whole and true.
    assert statistics.torn + statistics.whole == whole + 1
    held = training.engine._fetch("latest")
    weights = held.state["optimizer"]["state"]
    assert held.step in (step, step + 1)
    assert len({float(weights[index]["step"]) for index in weights if "step" in weights[index]}) <= 2


def test_several_optimizers_are_all_gated(job):
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    training = job.start(extra={"other": other, "second": optimizer})
    training.run(1, 1)

    assert training.optimizer._optimizer_step_pre_hooks
    assert optimizer._optimizer_step_pre_hooks
    training.engine.close()
    assert not training.optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
def test_an_unknown_value_is_refused_at_the_first_boundary(job):
    training = job.start(extra={"odd": {"thing": object()}})

    with pytest.raises(StateError, match=r"\$\.odd\.thing"):
        training.engine.boundary(1)


def test_an_unknown_value_that_appears_later_costs_that_snapshot_only(job, caplog):
    odd = {}
    training = job.start(extra={"odd": odd})
    training.run(1, 1)
    odd["thing"] = object()
    training.run(2, 3)
    del odd["thing"]
    training.run(4, 4)

    assert training.began == [True, False, False, True]
    assert training.engine.statistics().skipped == {"the state could not be captured": 2}
    warnings = [
        record.message for record in caplog.records if "odd" in record.message and record.levelname == "WARNING"
    ]
    assert len(warnings) == 1


class Slow:
    """An object whose state takes a while."""

    def state_dict(self):
        end = time.perf_counter() + 0.12
        while time.perf_counter() < end:
            pass
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.slow
def test_a_state_that_takes_long_to_collect_is_named_once(job, caplog):
    job.start(extra={"slow": Slow()}).run(1, 3)

    warnings = [record for record in caplog.records if "collecting the training state takes" in record.message]
    assert [record.levelname for record in warnings if record.levelname == "WARNING"] == ["WARNING"]


class Preempted(Exception):
    """Raised by a signal handler of the program."""


class Interrupted:
    """A signal arrives while its state is collected, or while it is encoded."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        self.steps += 1
        if self.steps == 3:
            signal.raise_signal(signal.SIGUSR2)
        return {}

    def load_state_dict(self, state):
        pass


class Encoded:
    """A value of a registered type."""

    steps = 0


def encode_interrupted(value):
    Encoded.steps += 1
    if Encoded.steps == 3:
        signal.raise_signal(signal.SIGUSR2)
    return 0


def preempt(number, frame):
    raise Preempted


@pytest.mark.slow
@pytest.mark.parametrize("when", ["collecting", "encoding"])
def test_an_exception_of_the_programs_signal_handler_in_a_boundary_reaches_the_loop(job, when, restored_signal):
    register_type(Encoded, name="tests.Encoded", encode=encode_interrupted, decode=lambda value: Encoded())
    Encoded.steps = 0
    training = job.start(extra={"extra": Interrupted() if when == "collecting" else {"value": Encoded()}})
    training.run(1, 2)

    with pytest.raises(Preempted):
        training.run(3, 3)

    training.run(4, 5)
    assert training.began == [True] * 4


@pytest.fixture
def restored_signal():
    before = signal.signal(signal.SIGUSR2, preempt)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.slow
def test_much_small_state_is_captured_at_each_step_behind_a_restart_from_memory(job):
    """The slot that fits is the newest capture, which may not be written over: others are asked for at once."""
    losses = {"losses": [0.1 * number for number in range(100_000)], "buffer": np.arange(1 << 14)}
    first = job.start(extra={"log": losses})
    first.run(1, 1)
    assert first.engine._wait_ready(TIMEOUT_S)  # for slots of the size that the first boundary found
    first.run(2, 4)
    job.crash(first)

    log = {"losses": [], "buffer": None}
    second = job.start(ready=False, extra={"log": log})
    snapshot = second.engine.restore("latest")
    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(5, 5)
    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(6, 9)

    assert (snapshot.step, snapshot.level) == (4, "memory")
    assert log["losses"] == losses["losses"]
    assert log["buffer"].tobytes() == losses["buffer"].tobytes()
    assert second.began == [True] * 5
    assert second.engine.statistics().shard_bytes > losses["buffer"].nbytes


OTHER_TRAINING = """
import signal, sys, torch
from lazysnap import SnapshotConfig, SnapshotEngine
engine = SnapshotEngine(SnapshotConfig(job_id=sys.argv[1]), {"model": torch.nn.Linear(2, 2)})
engine.boundary(1)
print("trains", flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_second_training_of_the_same_job_is_refused_at_once_and_told_nothing_else(job, zygote, tmp_path, caplog):
    """Not by a deadline, which would be that of this test."""
    output = tmp_path / "output"
    other = zygote.start(["-c", OTHER_TRAINING, job.job_id], {}, output)
    try:
        until(lambda: output.exists() and "trains" in output.read_text())
        for call in ("restore", "boundary"):
            second = job.start(ready=False, io_timeout_s=1000)
            with pytest.raises(JobBusy, match=r"runs already .* ends it; or give this one a directory"), second.engine:
                getattr(second.engine, call)()
    finally:
        other.kill()

    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_an_engine_that_was_closed_says_so_and_does_nothing(job, tmp_path, end):
    training = job.start(tmp_path)
    training.run(1, 1)
    getattr(training.engine, end)()
    engine, facts, stored = training.engine, training.facts(), sorted(tmp_path.glob("step-*/*"))

    calls = [
        engine.__enter__,
        engine._prepare,
        lambda: engine._wait_ready(1),
        engine.boundary,
        engine.restore,
        engine._fetch,
        engine._fetch_to_read,
        engine.rollback,
        lambda: engine.keep("a"),
        lambda: engine.release("a"),
        lambda: engine.wait(timeout_s=1),
        engine._replan,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"this engine was closed.*make another SnapshotEngine"):
            call()

    assert engine.step == 1
    assert {**training.facts(), "next": None} == {**facts, "next": None}
    assert end == "abandon" or sorted(tmp_path.glob("step-*/*")) == stored


@pytest.mark.slow
def test_a_fresh_start_beside_memory_of_an_earlier_one_is_stored_from_its_first_step(job, tmp_path):
    """What is in memory is of a training that was further than this one."""
    first = job.start()
    first.run(1, 30)
    job.crash(first)

    second = job.start(tmp_path, ready=False)
    second.engine._prepare()
    assert second.engine._wait_ready(TIMEOUT_S)
    second.run(1, 1)

    assert second.engine.wait(1, timeout_s=TIMEOUT_S)


def test_what_comes_after_the_end_of_a_training_is_harmless(job):
    training = job.start()
    training.run(1, 1)

    assert training.engine.close()
    assert training.engine.close()
    training.engine.abandon()
    training.engine.gate()
    training.train()
    assert not training.engine._last_boundary(2)  # an integration's, at its end
    assert training.engine.statistics().whole == 1


def test_a_job_needs_a_name(monkeypatch):
    monkeypatch.delenv("LAZYSNAP_JOB_ID", raising=False)

    with pytest.raises(ConfigError, match="job_id"):
        SnapshotEngine(SnapshotConfig(), {"counters": {}})


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_boundaries_start_no_garbage_collection_and_leave_the_collector_as_it_was(job, enabled):
    training = job.start(extra={"many": {"lists": [[number] for number in range(20_000)]}})
    training.run(1, 1)
    started = []
    gc.collect()
    gc.enable() if enabled else gc.disable()
    gc.callbacks.append(lambda phase, info: started.append(phase))
    try:
        training.engine.boundary(2)
        during = len(started)
        still_enabled = gc.isenabled()
    finally:
        gc.callbacks.pop()
        gc.enable()

    assert still_enabled is enabled
    # What is freed behind the boundary may start a young one; without the pause there are dozens.
    assert during <= 4


@pytest.mark.parametrize("make", [lambda model: model, lambda model: [model], lambda model: {}, lambda model: None])
def test_what_is_no_state_is_refused_when_the_engine_is_made(job, make):
    training = job.start()
    with pytest.raises(ConfigError, match=r"the state must be a dict of names to objects, .* or a StateSource; got"):
        SnapshotEngine(job.config(), make(torch.nn.Linear(2, 2)))

    training.run(1, 1)  # it was not replaced


@pytest.mark.slow
def test_durable_means_the_first_level_and_no_other_one(job, tmp_path):
    broken, works = tmp_path / "broken", tmp_path / "works"
    broken.write_text("in the way of the level's directory")
    training = job.start(broken, works)

    def trained():
        training.run(training.engine.step + 1, training.engine.step + 1)
        return training.engine.statistics().last_durable_step.get(str(works))

    newest = until(trained)

    assert not training.engine.wait(newest, until="durable", timeout_s=0.2)
    assert not training.engine.close()
