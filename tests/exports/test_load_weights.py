"""``load_weights`` gives what ``model.state_dict()`` was, whatever wrote the snapshot: bit for bit, and verified."""

from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from support.damage import flip
from support.saving import OTHER, RUN, Snapshot, bits, directory_of, rows, write, write_all
from torch import nn

import lazysnap
from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.errors import ConfigError, FormatError, SnapshotNotFound, StateError


class Model(nn.Module):
    """Tied weights, buffers, a frozen part, a state that is no tensor, a dtype that safetensors has not got."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.base = nn.Linear(300, 300).requires_grad_(False)
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "moment": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, x):
        self.seen += 1
        self.phase += 1j
        return self.head(self.body(self.embed(x)))


def facts(state):
    plain = {name: bits(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    extra = state["_extra_state"]
    return plain | {"_extra_state": (extra["seen"], bits(extra["moment"]))}


def train(directory, job, model, steps, name="model"):
    """What the state dict was after each step."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    config = SnapshotConfig(
        levels=(PersistentLevel(directory, every_n_steps=1, keep_last=9),), job_id=job, memory=MemoryLevel(linger_s=1)
    )
    engine = SnapshotEngine(config, {name: model, "optimizer": optimizer})
    was = {}
    try:
        assert engine._wait_ready(60)
        for step in range(1, steps + 1):
            model(torch.tensor([1, 2, 3])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert engine.boundary(step)
            assert engine.wait(step, timeout_s=60)
            if step == 1:
                engine.keep("first")
            was[step] = facts(model.state_dict())
    finally:
        assert engine.close()
    return was


@pytest.mark.slow
def test_the_weights_of_a_plain_loop_come_back_bit_for_bit_and_a_damaged_latest_is_passed_over(tmp_path, caplog):
    level = tmp_path / "level"
    was = train(level, str(tmp_path), Model(), 3)

    for which, step in (("latest", 3), (2, 2), ("first", 1)):
        state = lazysnap.load_weights(level, which)
        assert facts(state) == was[step]
        assert state["head.weight"] is state["embed.weight"], "tied tensors are one"
        assert {value.device.type for value in state.values() if torch.is_tensor(value)} == {"cpu"}
        assert Model().load_state_dict(state) == nn.modules.module._IncompatibleKeys([], [])

    (shard,) = level.glob("step-00000003*/*.safetensors")
    flip(shard, -9)
    with pytest.raises(FormatError, match="step-00000003-"):
        lazysnap.load_weights(level, 3)
    assert facts(lazysnap.load_weights(level)) == was[2]
    assert "step-00000003-" in caplog.text


def test_sharded_weights_of_several_ranks_come_back_whole(tmp_path):
    torch.manual_seed(0)
    weights = {"a": torch.randn(5, 3), "b": torch.randn(4).to(torch.bfloat16), "scale": torch.tensor(2.0)}
    state = {"model": weights, "optimizer": {"big": torch.zeros(1000)}}
    for step, world in ((10, 3), (20, 2)):
        write_all(Snapshot(str(tmp_path), world, step=step, run=OTHER), state, rows(world))

    for which in ("latest", 10):
        loaded = lazysnap.load_weights(str(tmp_path), which)
        assert list(loaded) == list(weights)
        assert {name: bits(tensor) for name, tensor in loaded.items()} == {n: bits(t) for n, t in weights.items()}

    next((tmp_path / directory_of(20, OTHER)).glob("node-00001-*.json")).unlink()
    with pytest.raises(SnapshotNotFound, match=r"no complete snapshot 20 that can be read; found: .*1 of 2 ranks"):
        lazysnap.load_weights(tmp_path, 20)


@pytest.mark.slow
def test_another_name_than_model_is_asked_for_and_what_is_wrong_is_said(tmp_path):
    level = tmp_path / "level"
    was = train(level, str(tmp_path), Model(), 1, name="generator")
    with pytest.raises(StateError, match=r"no part 'model', its parts are \['generator', 'optimizer', 'rng'\]"):
        lazysnap.load_weights(level)
    assert facts(lazysnap.load_weights(level, part="generator")) == was[1]
    with pytest.raises(SnapshotNotFound, match="lazysnap ls"):
        lazysnap.load_weights(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="which"):
        lazysnap.load_weights(level, 1.5)


class Busy(MemoryFileSystem):
    """A store in which a training keeps one snapshot: whenever somebody reads the newest, a newer one takes its place.

    ``waiting``: the later contents of the store. ``suffix``: the objects whose reading brings the next one.
    """

    protocol = "busy"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    waiting: ClassVar[list[dict]] = []
    suffix = ""

    def cat_file(self, path, start=None, end=None, **options):
        if self.waiting and path.endswith(self.suffix):
            self.store.clear()
            self.store.update(self.waiting.pop(0))
        return super().cat_file(path, start, end, **options)


@pytest.fixture
def busy():
    """Return a function that fills the store with some steps, of which all but the first wait for a read."""
    fsspec.register_implementation("busy", Busy, clobber=True)

    def fill(steps, suffix):
        contents = []
        for step in steps:
            Busy.store.clear()
            write_all(Snapshot("busy://level", 2, step=step), {"model": {"w": torch.full((30,), float(step))}}, rows(2))
            contents.append(dict(Busy.store))
        Busy.store.clear()
        Busy.store.update(contents.pop(0))
        Busy.suffix = suffix
        Busy.waiting[:] = contents

    yield fill
    Busy.store.clear()
    Busy.waiting.clear()


@pytest.mark.parametrize("suffix", ["00001-of-00002.json", "00000-of-00002.safetensors"])
def test_beside_a_training_that_keeps_one_snapshot_the_next_newest_is_read(busy, suffix, caplog, tmp_path):
    busy([1, 2, 3, 4], suffix)

    assert lazysnap.load_weights("busy://level")["w"].tolist() == [4.0] * 30
    assert not caplog.text

    busy([1, 2, 3, 4], suffix)
    assert lazysnap.export("busy://level", tmp_path / "w.safetensors").step == 4
    assert load_file(tmp_path / "w.safetensors")["w"].tolist() == [4.0] * 30

    busy([1, 2], suffix)
    with pytest.raises(SnapshotNotFound, match="no complete snapshot 1"):
        lazysnap.load_weights("busy://level", 1)

    busy(range(1, 99), suffix)
    with pytest.raises(SnapshotNotFound, match="deleted while it was read; raise keep_last"):
        lazysnap.load_weights("busy://level")


@pytest.mark.parametrize("claim", [{}, {"other": 1}, {"model": {"$": "registered", "n": "x", "v": {}}}, [], 7])
def test_a_forged_newest_snapshot_is_passed_over_and_named(tmp_path, caplog, claim):
    url = str(tmp_path)
    write_all(Snapshot(url, 1, step=5), {"model": {"w": torch.ones(3)}}, rows(1))
    write(Snapshot(url, 1, step=9), 0, {"model.w": (torch.zeros(3), None)}, claim)

    assert lazysnap.load_weights(url)["w"].tolist() == [1.0] * 3
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("step 9 skipped: ")
    with pytest.raises((StateError, FormatError)):
        lazysnap.load_weights(url, 9)


def test_a_deleted_manifest_is_named(tmp_path, caplog):
    url = str(tmp_path)
    for step in (5, 9):
        write_all(Snapshot(url, 2, step=step), {"model": {"w": torch.full((30,), float(step))}}, rows(2))
    (manifest,) = (tmp_path / directory_of(9)).glob("node-00001-*.json")
    manifest.unlink()

    assert lazysnap.load_weights(url)["w"].tolist() == [5.0] * 30
    assert f"{manifest.with_suffix('.safetensors')} has no manifest" in caplog.text


def test_the_weights_of_a_run_are_those_of_its_newest_snapshot_or_of_one_step_of_it(tmp_path):
    url, value = str(tmp_path), 0.0
    for run, step in ((RUN, 10), (RUN, 30), (OTHER, 20)):
        value += 1
        write_all(Snapshot(url, 1, step=step, run=run), {"model": {"w": torch.full((3,), value)}}, rows(1))

    def loaded(which):
        return lazysnap.load_weights(url, which)["w"].tolist()

    assert loaded("latest") == [3.0] * 3, "OTHER began last"
    assert loaded(f"run:{RUN[:4]}") == [2.0] * 3
    assert loaded(f"run:{RUN[:4]}@10") == [1.0] * 3
    assert loaded(f"run:{OTHER}") == [3.0] * 3
    with pytest.raises(SnapshotNotFound, match="run:1111@20"):
        lazysnap.load_weights(url, f"run:{RUN[:4]}@20")
    with pytest.raises(SnapshotNotFound, match="no run begins with 'abc'; the runs there, the newest first: 2222"):
        lazysnap.load_weights(url, "run:abc")
    with pytest.raises(ConfigError, match="first digits"):
        lazysnap.load_weights(url, "run:x")
