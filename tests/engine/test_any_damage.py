"""Whatever is damaged in any file of a level: what is loaded is right, and what is whole is found."""

import os
import pathlib
import random

import pytest
import torch
from small_training import TIMEOUT_S, Starter, fetch_stored
from support.stored import steps_at

from lazysnap.errors import LazySnapError

STEPS = (1, 2, 3)
FLIPS = 10
"""In each part of each file."""


@pytest.fixture
def job():
    starter = Starter()
    yield starter
    starter.clean_up()


def flip(data, start, stop, draw):
    at = draw.randrange(start, min(stop, len(data)))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def damages(data, draw):
    """Name and content of each version that is not what was written."""
    parts = {"the first bytes": (0, 16), "the header": (16, 600), "the body": (600, len(data))}
    for part, (start, stop) in parts.items():
        if start < len(data):
            yield from ((f"a bit of {part} flipped", flip(data, start, stop, draw)) for _ in range(FLIPS))
    cut = draw.randrange(len(data)) if data else 0
    if data:
        yield "truncated", data[:cut]
        yield "empty", b""
        yield "zeros from somewhere on", data[:cut] + bytes(len(data) - cut)
    yield "extended", data + draw.randbytes(draw.choice([1, 4096]))


def swaps(files, draw):
    """Pairs of files, and what is in them afterwards."""
    for kind in {path.suffix for path in files}:
        alike = [path for path in files if path.suffix == kind]
        for one in alike[1:]:
            yield one, draw.choice(alike[: alike.index(one)])


def tensors_of(state):
    """Copies of all tensors of model and optimizer, by name."""
    tensors = {f"model.{name}": tensor.clone() for name, tensor in state["model"].items()}
    for index, values in state["optimizer"]["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor.clone() for name, tensor in values.items()}
    return tensors


def are_equal(tensors, others):
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def judge(engine, held, touched):
    """What is wrong with what is loaded while these files are damaged; ``None`` if nothing."""
    broken = {step for step in STEPS for path in touched if f"{step:08d}" in path.parent.name}
    try:
        snapshot = fetch_stored(engine)
    except LazySnapError as error:
        return f"refused: {error}"
    if snapshot is None:
        return "nothing was found"
    if not are_equal(tensors_of(snapshot.state), held[snapshot.step]):
        return f"step {snapshot.step} was loaded, and is wrong"
    newest_whole = max(set(STEPS) - broken)
    if snapshot.step < newest_whole:
        return f"step {snapshot.step} was loaded, {newest_whole} is whole"
    return None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("round_", range(2))
def test_nothing_wrong_is_loaded_and_what_is_whole_is_found(job, tmp_path, round_):
    first = job.start(tmp_path)
    held = {}
    for step in STEPS:
        first.run(step, step)
        held[step] = tensors_of({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()})
        if step == 1:
            first.engine.keep("a-name")  # else it goes when there are two newer ones
        assert first.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
    assert first.engine.close()
    assert steps_at(tmp_path) == list(STEPS)
    engine = job.start(tmp_path, ready=False).engine
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert {path.suffix for path in files} >= {".json", ".safetensors"}
    assert judge(engine, held, []) is None

    draw = random.Random(round_)
    found = []
    for path in files:
        data = path.read_bytes()
        for how, content in damages(data, draw):
            if content == data:
                continue
            path.write_bytes(content)
            found.append((path.relative_to(tmp_path), how, judge(engine, held, [path])))
        path.write_bytes(data)
        path.unlink()
        found.append((path.relative_to(tmp_path), "deleted", judge(engine, held, [path])))
        path.write_bytes(data)
    for one, other in swaps(files, draw):
        swap(one, other)
        what = f"swapped with {other.relative_to(tmp_path)}"
        found.append((one.relative_to(tmp_path), what, judge(engine, held, [one, other])))
        swap(one, other)

    assert len(found) > 200
    assert [line for line in found if line[-1]] == []
    assert judge(engine, held, []) is None


def swap(one: pathlib.Path, other: pathlib.Path) -> None:
    aside = one.with_name(".aside")
    for source, target in ((one, aside), (other, one), (aside, other)):
        os.rename(source, target)
