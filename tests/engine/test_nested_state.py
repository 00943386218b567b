"""Small state may be nested up to a stated depth: what is captured can be read back, what is deeper is refused."""

import re
import sys
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from small_training import TIMEOUT_S

from lazysnap import register_type
from lazysnap.cli import main
from lazysnap.errors import StateError
from lazysnap.shard.limits import MAX_STATE_DEPTH
from lazysnap.state import codec

ABOVE = 2
"""The state itself, and the dict that is one of its objects."""


class Chain:
    """A program's own type."""

    def __init__(self, rest):
        self.rest = rest

    def __eq__(self, other):
        return type(other) is Chain and self.rest == other.rest


KINDS = {
    "lists": lambda inner: [inner],
    "tuples": lambda inner: (1, inner),
    "texts": lambda inner: {"key": inner},
    "numbers": lambda inner: {7: inner},
    "ordered": lambda inner: OrderedDict(key=inner),
    "default": lambda inner: defaultdict(list, {0: inner}),
    "queues": lambda inner: deque([inner], maxlen=3),
    "chains": Chain,
    "keys": lambda inner: {(inner if isinstance(inner, (int, tuple)) else 0,): 1},
}


def nested(wrap, levels):
    value = 5
    for _ in range(levels):
        value = wrap(value)
    return value


def tuples_as_key(levels):
    key = 5
    for _ in range(levels - 1):
        key = (key,)
    return {key: 1}


def deep(levels):
    values = {name: nested(wrap, levels) for name, wrap in KINDS.items() if name != "keys"}
    return {**values, "keys": tuples_as_key(levels), "tensor": nested(KINDS["numbers"], levels)}


@pytest.fixture(autouse=True)
def chains(monkeypatch):
    monkeypatch.setattr(codec, "_registered", {})
    monkeypatch.setattr(codec, "_decoders", {})
    register_type(Chain, name="chain", encode=lambda chain: chain.rest, decode=Chain)


def with_little_stack(work, left=80):
    """Call ``work`` where only so many frames are left."""

    def descend(levels):
        return work() if not levels else descend(levels - 1)

    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return descend(sys.getrecursionlimit() - depth - left)


@pytest.mark.slow
def test_what_is_nested_as_deep_as_allowed_is_stored_shown_verified_and_restored(job, tmp_path):
    values = deep(MAX_STATE_DEPTH - ABOVE)
    values["tensor"] = {"weights": nested(KINDS["numbers"], MAX_STATE_DEPTH - ABOVE - 2) | {0: torch.arange(3)}}
    first = job.start(tmp_path / "level", extra={"deep": values})
    first.train()
    assert with_little_stack(lambda: first.engine.boundary(1))
    first.train()
    assert with_little_stack(lambda: first.engine.boundary(2))
    assert first.engine.wait(timeout_s=TIMEOUT_S)
    assert first.engine.close()

    level, copy = str(tmp_path / "level"), str(tmp_path / "copy")
    for what in (["ls", level], ["verify", level], ["show", level, "latest"], ["show", level, "latest", "--all"]):
        assert main(what) == 0
        assert main([*what, "--json"]) == 0
    assert main(["copy", level, copy]) == 0
    for form in ("state.ckpt", "dcp"):
        assert main(["export", copy, "latest", "--to", str(tmp_path / form)]) == 0

    found = {"nothing": None}
    second = job.start(copy, ready=False, extra={"deep": found})
    snapshot = with_little_stack(lambda: second.engine.restore("latest"), left=160)

    assert snapshot.step == 2
    assert found.pop("tensor")["weights"].pop(0).equal(torch.arange(3))
    values.pop("tensor")
    assert found == values


@pytest.mark.slow
def test_what_is_nested_deeper_is_refused_at_the_first_boundary_by_its_path(job, tmp_path):
    levels = MAX_STATE_DEPTH - ABOVE + 1
    cycle = {}
    cycle["again"] = cycle
    values = {kind: nested(wrap, levels) for kind, wrap in KINDS.items()}
    values |= {"cycle": cycle, "keys": tuples_as_key(levels)}
    holder = {}
    training = job.start(tmp_path, extra={"deep": holder})
    training.train()

    for kind, value in values.items():
        holder["values"] = value
        with pytest.raises(StateError) as refused:
            training.engine.boundary(1)
        assert re.match(r"\$\.deep\.values.{0,90}…: nested more than 100 deep", str(refused.value)), kind

    assert not training.engine.wait(timeout_s=TIMEOUT_S)
    assert not training.engine.close()


@pytest.mark.slow
def test_a_state_that_becomes_too_deep_costs_its_snapshots_and_close_says_so(job, tmp_path):
    holder = {"values": 1}
    training = job.start(tmp_path, extra={"deep": holder})
    training.run(1, 1)
    holder["values"] = nested(KINDS["tuples"], MAX_STATE_DEPTH)

    training.run(2, 2)

    assert training.began == [True, False]
    assert training.engine.statistics().skipped == {"the state could not be captured": 1}
    assert not training.engine.close()
