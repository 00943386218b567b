"""Nothing is handed out that does not verify, and what is passed over is named."""

import gc
import os
import re
import shutil
import signal
import weakref
from functools import partial

import pytest
import torch
from small_training import TIMEOUT_S, Starter, Training, damage_newest_at_rest, end
from support.damage import flip

from lazysnap import (
    MemoryLevel,
    PersistentLevel,
    SnapshotConfig,
    SnapshotEngine,
    load_weights,
    register_type,
)
from lazysnap.errors import ConfigError, LevelError, SnapshotNotFound, StateError
from lazysnap.state import codec

MEMORY = MemoryLevel(linger_s=60)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The directory of a training that ended after three steps: steps 2 and 3 are there."""
    directory = tmp_path_factory.mktemp("stored") / "level"
    training = Starter().start(directory)
    for step in (1, 2, 3):
        training.run(step, step)
        assert training.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
    end(training)
    return directory


@pytest.fixture
def level(stored, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(stored, tmp_path / "level")


def shard(directory, step):
    return next(directory.glob(f"step-{step:08d}-*/*.safetensors"))


def mapped_slots():
    with open("/proc/self/maps") as file:
        return file.read().count("lazysnap-slot")


def test_a_default_device_of_the_program_does_not_decide_where_the_state_comes_to(job, level):
    training = job.start(level, ready=False)

    with torch.device("meta"):
        assert training.engine.restore("latest").step == 3

    states = training.optimizer.state_dict()["state"].values()
    assert {tensor.device.type for state in states for tensor in state.values()} == {"cpu"}
    assert {state["step"].item() for state in states} == {3.0}


def test_nothing_there_is_none_and_leaves_the_model_alone(job, tmp_path):
    training = job.start(tmp_path, ready=False)
    before = training.model[0].weight.clone()

    assert training.engine.restore("latest") is None
    assert torch.equal(training.model[0].weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_an_engine_at_its_end_keeps_nothing_of_the_training_in_memory(job, end):
    """Models and workers of loaders go with the program's own last reference, without the garbage collector."""
    model = torch.nn.Linear(8, 8)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight])
    engine = SnapshotEngine(job.config(), {"model": model, "optimizer": optimizer})
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        engine.boundary()
    held = [weakref.ref(one) for one in (model, optimizer, model.weight, model.bias)]
    gc.collect()
    gc.disable()
    try:
        getattr(engine, end)()
        del model, optimizer
        assert [one() for one in held] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.slow
def test_an_engine_that_is_closed_maps_no_slot_any_more_whatever_was_fetched(job, tmp_path):
    first = job.start(tmp_path, memory=MEMORY)
    first.run(1, 1)
    assert first.engine.wait(1, until="captured", timeout_s=TIMEOUT_S)
    first.engine.abandon()
    gc.collect()
    gc.disable()
    try:
        before = mapped_slots()
        second = job.start(tmp_path, memory=MEMORY, ready=False)
        snapshot = second.engine._fetch()
        assert mapped_slots() > before
        second.engine.close()
        assert mapped_slots() <= before
    finally:
        gc.enable()
    assert snapshot.level == "memory"


@pytest.mark.slow
@pytest.mark.parametrize("where", [9, 5000, -1])
def test_a_flipped_byte_costs_that_snapshot_and_is_named(job, level, where):
    path = shard(level, 3)
    flip(path, where)

    snapshot = job.start(level, ready=False).engine._fetch("latest")

    assert snapshot.step == 2
    [reason] = snapshot.skipped
    assert reason.startswith("step 3 skipped: ")
    assert f"{path}: block" in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("safetensors", "bytes, the manifest says"),
        ("json", "the manifest is damaged"),
        ("gone", "without its file"),
        ("bare", "has no manifest"),
    ],
)
def test_one_line_says_which_snapshot_is_passed_over_and_why(job, level, caplog, kind, reason):
    path = shard(level, 3)
    if kind == "gone":
        path.unlink()
    elif kind == "bare":
        path.with_suffix(".json").unlink()
    else:
        path = path.with_suffix(f".{kind}")
        os.truncate(path, path.stat().st_size // 2)

    assert job.start(level, ready=False).engine.restore().step == 2

    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("step 3 skipped: ")
    assert str(path) in line
    assert reason in line


def stored_with(job, level, **extra):
    """A training with ``extra`` objects that ended after two steps; both are stored."""
    training = job.start(level, extra=extra)
    for step in (1, 2):
        training.run(step, step)
        assert training.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
    assert training.engine.close()


@pytest.mark.slow
def test_an_error_of_the_programs_own_objects_ends_the_restart_and_costs_no_snapshot(job, tmp_path, caplog):
    """It was taken for one of each snapshot, which were passed over one after the other."""

    class Odd(torch.nn.Linear):
        is_odd = False

        def state_dict(self, *arguments, **options):
            if self.is_odd:
                raise NotImplementedError
            return super().state_dict(*arguments, **options)

    stored_with(job, tmp_path, odd=Odd(2, 2))
    odd = Odd(2, 2)
    again = job.start(tmp_path, ready=False, extra={"odd": odd})
    odd.is_odd = True

    with pytest.raises(StateError, match=r"cannot be asked for the tensors.*NotImplementedError\(\)") as caught:
        again.engine._fetch()  # as integrations do

    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert "skipped: " not in caplog.text
    odd.is_odd = False
    assert again.engine.restore().step == 2


class Label:
    """A value of a registered type."""

    def __init__(self, text):
        self.text = text


@pytest.fixture
def label_type(monkeypatch):
    """Register ``Label`` as a program does. What it returns undoes that, as in a program that forgot it."""
    monkeypatch.setattr(codec, "_registered", {})
    monkeypatch.setattr(codec, "_decoders", {})
    register_type(Label, name="tests.Label", encode=lambda label: label.text, decode=Label)
    return codec._decoders.clear


@pytest.mark.slow
def test_a_type_that_the_program_forgot_to_register_ends_the_restart_with_its_name(job, tmp_path, caplog, label_type):
    """All snapshots were passed over for it, and training began at step 0."""
    stored_with(job, tmp_path, values={"label": Label("first")})
    again = job.start(tmp_path, ready=False, extra={"values": {"label": Label("")}})
    label_type()

    with pytest.raises(StateError, match=r"type 'tests.Label', which is not registered.*register_type"):
        again.engine.restore()

    assert "skipped: " not in caplog.text


@pytest.mark.slow
def test_a_value_that_its_decoder_refuses_costs_that_snapshot_only(job, tmp_path, caplog, label_type):
    label = Label("first")

    def label_without_x(text):
        if "x" in text:
            raise ValueError("no label")
        return Label(text)

    register_type(Label, name="tests.Label", encode=lambda label: label.text, decode=label_without_x)
    training = job.start(tmp_path, extra={"values": {"label": label}})
    for step, label.text in ((1, "first"), (2, "x")):
        training.run(step, step)
        assert training.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
    assert training.engine.close()

    again = job.start(tmp_path, ready=False, extra={"values": {"label": Label("")}})

    assert again.engine.restore().step == 1
    assert re.search("step 2 skipped: .*ValueError: no label", caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError("x"), AssertionError("no label")])
def test_a_decoder_that_refuses_every_snapshot_ends_the_restart(job, tmp_path, label_type, error):
    """A bug in the program: the training would begin at step 0 as if nothing were stored."""
    stored_with(job, tmp_path, values={"label": Label("first")})

    def broken(text):
        raise error

    register_type(Label, name="tests.Label", encode=lambda label: label.text, decode=broken)
    again = job.start(tmp_path, ready=False, extra={"values": {"label": Label("")}})

    with pytest.raises(
        StateError, match=rf"decoder of 'tests.Label' raised {type(error).__name__}.*Nothing was loaded"
    ):
        again.engine.restore()
    with pytest.raises(StateError, match="Nothing was loaded"):
        again.engine.restore(2)

    register_type(Label, name="tests.Label", encode=lambda label: label.text, decode=Label)
    assert again.engine.restore().step == 2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["critic", "critic.net.optimizer"])
def test_names_of_objects_may_have_points(job, tmp_path, optimizer):
    """What an optimizer holds was taken for tensors of the model whose name begins alike, and nothing was loaded."""

    def objects():
        net = torch.nn.Linear(3, 3)
        return {"critic.net": net, optimizer: torch.optim.AdamW(net.parameters())}

    first = objects()
    training = job.start(tmp_path, extra=first)
    first["critic.net"](torch.ones(3)).sum().backward()
    first[optimizer].step()
    first[optimizer].zero_grad()
    training.run(1, 1)
    end(training)
    again = objects()

    assert job.start(tmp_path, ready=False, extra=again).engine.restore().step == 1

    assert torch.equal(again["critic.net"].weight, first["critic.net"].weight)
    moments = [each[optimizer].state_dict()["state"][0]["exp_avg"] for each in (first, again)]
    assert torch.equal(*moments)


@pytest.mark.slow
def test_what_a_decoder_refuses_is_not_read_again_from_another_level(job, tmp_path, caplog, label_type):
    levels = (tmp_path / "fast", tmp_path / "slow")
    training = job.start(*levels, extra={"values": {"label": Label("first")}})
    training.run(1, 1)
    assert training.engine.close()
    decoded = []

    def broken(text):
        decoded.append(text)
        raise ValueError("no label")

    register_type(Label, name="tests.Label", encode=lambda label: label.text, decode=broken)
    again = job.start(*levels, ready=False, extra={"values": {"label": Label("")}})

    with pytest.raises(StateError, match="ValueError: no label"):
        again.engine.restore()

    assert decoded == ["first"]
    assert "step 1 skipped: the decoder of 'tests.Label' raised" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("has_level", [True, False])
def test_memory_whose_bytes_a_decoder_refuses_gives_way_to_storage(job, tmp_path, label_type, has_level):
    """Memory may have no checksums yet: a decoder may be the first that notices damage."""
    levels = [tmp_path] if has_level else []
    training = job.start(*levels, memory=MEMORY, extra={"values": {"label": Label("first")}})
    training.run(1, 1)
    if has_level:
        assert training.engine.wait(1, until="durable", timeout_s=TIMEOUT_S)
    training.engine.abandon()
    decoded = []

    def fails_once(text):
        decoded.append(text)
        if len(decoded) == 1:
            raise ValueError("damaged")
        return Label(text)

    register_type(Label, name="tests.Label", encode=lambda label: label.text, decode=fails_once)
    again = job.start(*levels, memory=MEMORY, ready=False, extra={"values": {"label": Label("")}})

    if has_level:
        snapshot = again.engine.restore()
        assert (snapshot.step, snapshot.level) == (1, str(tmp_path))
        assert any("memory skipped: the decoder of" in reason for reason in snapshot.skipped)
    else:
        with pytest.raises(StateError, match="ValueError: damaged"):
            again.engine.restore()


def test_a_corrupt_fast_level_gives_way_to_the_slow_one(job, tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    training = job.start(fast, slow)
    training.run(1, 2)
    assert training.engine.close()
    flip(shard(fast, 2), 5000)

    snapshot = job.start(fast, slow, ready=False).engine._fetch("latest")

    assert (snapshot.step, snapshot.level) == (2, str(slow))
    assert any(str(fast) in reason for reason in snapshot.skipped)


@pytest.mark.slow
def test_a_step_can_be_chosen_and_one_that_is_not_there_is_refused(job, level):
    engine = job.start(level, ready=False).engine

    assert engine._fetch(2).step == 2
    with pytest.raises(SnapshotNotFound, match="no complete snapshot of step 77"):
        engine._fetch(77)


@pytest.mark.slow
def test_another_model_is_refused_by_name_and_nothing_is_loaded(job, level):
    other = job.start(level, ready=False, width=17)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}

    with pytest.raises(StateError, match=r"model\.0\.weight: torch\.float32 \[16, 6\] there") as caught:
        other.engine.restore("latest")

    assert caught.value.__cause__ is None  # it would be shown as the same text once more
    for name, value in other.model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.slow
def test_odd_dtypes_and_tied_weights_come_back(job):
    tied = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False)])
    tied.append(tied[0])
    values = {
        "f8": torch.arange(8.0).to(torch.float8_e4m3fn),
        "wide": torch.complex(torch.ones(3).double(), torch.zeros(3).double()),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "empty": torch.zeros(0, 2),
    }
    training = job.start(extra={"tied": tied, "values": values})
    training.run(1, 1)

    state = training.engine._fetch("latest").state

    assert state["tied"]["0.weight"].equal(tied[0].weight)
    assert state["tied"]["1.weight"].equal(tied[0].weight)
    for name, value in values.items():
        assert state["values"][name].dtype is value.dtype
        assert torch.equal(state["values"][name], value), name


@pytest.mark.slow
def test_a_directory_that_vanished_does_not_stop_a_restart_from_memory(job, tmp_path):
    directory = tmp_path / "snapshots"
    first = job.start(directory)
    first.run(1, 3)
    assert first.engine.wait(3, until="durable", timeout_s=TIMEOUT_S)
    job.crash(first)
    directory.rename(tmp_path / "elsewhere")  # at once: the keeper may just be writing there

    snapshot = job.start(directory, ready=False).engine._fetch("latest")

    assert (snapshot.step, snapshot.level) == (3, "memory")


@pytest.mark.slow
@pytest.mark.parametrize("where", [30, -1], ids=["a name in the header", "the last byte"])
def test_damage_in_memory_is_named_as_such_whatever_else_it_looks_like(job, where):
    """The bytes are compared while they are read: what is wrong with them may be met before."""
    training = job.start(memory=MEMORY)
    training.run(1, 2)
    job.crash(training)
    damage_newest_at_rest(job, where)

    snapshot = job.start(ready=False, memory=MEMORY).engine._fetch("latest")

    assert snapshot.step == 1
    assert any("step 2" in reason and "xxh3" in reason for reason in snapshot.skipped)


@pytest.mark.slow
def test_what_the_last_keeper_writes_until_it_ends_is_found(job, tmp_path):
    """A job that is put back into the queue: its trainer is dead, its keeper was told to end, and still writes."""
    level = PersistentLevel(str(tmp_path), every_n_steps=1, keep_last=1, max_bytes_per_s=2_000_000)
    config = SnapshotConfig(job_id=job.job_id, levels=(level,), memory=MEMORY)
    training = Training(config, width=384)
    job.trainings.append(training)
    assert training.engine._wait_ready(TIMEOUT_S)
    training.run(1, 1)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    training.run(2, 9)
    assert training.engine.statistics().last_whole_step == 9
    keeper = training.engine._client.keeper_pid
    job.crash(training)
    os.kill(keeper, signal.SIGTERM)

    other = Training(config, width=384)
    job.trainings.append(other)

    assert other.engine.restore("latest").step == 9


@pytest.mark.slow
def test_what_vanishes_between_listing_and_reading_is_looked_for_again(job, level, stored, passing):
    shutil.rmtree(shard(level, 3).parent)
    listed = []

    def vanish(name):
        if name == "restore.surveyed" and not listed:
            listed.append(name)
            shutil.rmtree(level)
            shutil.copytree(stored, level)
            shutil.rmtree(shard(level, 2).parent)

    passing(vanish)
    snapshot = job.start(level, ready=False).engine._fetch("latest")

    assert listed
    assert (snapshot.step, snapshot.skipped) == (3, ())


@pytest.mark.slow
def test_what_chooses_no_snapshot_is_refused(job, tmp_path):
    training = job.start(tmp_path)
    training.run(1, 2)
    assert training.engine.wait(timeout_s=TIMEOUT_S)

    for which in (True, None, 1.5, b"latest", ["latest"]):
        for call in (training.engine.restore, training.engine._fetch, partial(load_weights, tmp_path)):
            with pytest.raises(ConfigError, match=r'"latest", a step, a name or a run \("run:1f3a"'):
                call(which)
    assert training.engine.step == 2


def test_a_reader_is_told_nothing_of_training(tmp_path):
    place = tmp_path / "level"
    place.write_text("a file stands where the directory should be")
    with pytest.raises(LevelError, match="Not a directory") as error:
        load_weights(place)
    assert "training" not in str(error.value).replace(str(tmp_path), "")


@pytest.mark.parametrize("place", [None, 5, "", b"/tmp"])
def test_what_is_no_place_is_refused(place):
    with pytest.raises(ConfigError, match=r"load_weights.* must be a path or URL"):
        load_weights(place)
