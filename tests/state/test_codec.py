"""Small state survives the safe encoding exactly, and nothing else gets in or out."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import gc
import json
import pathlib
import random
import types
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lazysnap
from lazysnap.errors import FormatError, StateError
from lazysnap.state import codec
from lazysnap.state.codec import decode, encode
from lazysnap.state.walk import StateWalker, walk


def round_trip(value: object, **options: object) -> object:
    tensors: dict[str, torch.Tensor] = {}

    def add(tensor: torch.Tensor, path: tuple) -> str:
        tensors[str(len(tensors))] = tensor
        return str(len(tensors) - 1)

    text = json.dumps(encode(value, tensor=add, **options), allow_nan=False)
    return decode(json.loads(text), tensor=lambda name: tensors[name].clone())


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Registered:
    def __init__(self, value: int) -> None:
        self.value = value


VALUES = [
    None, True, 0, -5, 2**53 - 1, 2**53, -(2**70), 1.5, -0.0, 5e-324, "", "Grüße \ud800 \u2028", [], {}, [[], {}],
    (), (1, (2, "3")), {1: "a", None: 2, (1, 2): [3]}, {"$": "tuple", "v": [1]}, {"a": {"$": 1}},
    {1, 2, 3}, frozenset({"a"}), collections.OrderedDict(b=1, a=2), collections.Counter({3: 2, "x": 1}),
    collections.deque([1, 2], maxlen=5), 1 + 2j, complex(0, float("inf")), b"\0\xff", range(1, 10, 3),
    pathlib.Path("/a/b"), datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc), datetime.date(2026, 1, 2),
    datetime.timedelta(days=-1, microseconds=5), decimal.Decimal("1.10"), argparse.Namespace(a=1, b=[2]),
    types.SimpleNamespace(x=(1,)), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.strided,
    torch.channels_last, np.dtype("float32"), list(range(700)), [2**60, 1],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:20]!r}")
def test_a_value_comes_back_as_it_was(value):
    got = round_trip(value)

    assert got == value
    assert type(got) is type(value)
    if isinstance(value, float):
        assert str(got) == str(value)  # -0.0


def test_values_that_do_not_equal_themselves_come_back():
    assert str(round_trip(float("nan"))) == "nan"
    assert round_trip([float("inf"), float("-inf")]) == [float("inf"), float("-inf")]
    assert bytes(round_trip(bytearray(b"ab"))) == b"ab"
    got = round_trip(collections.defaultdict(list, {1: [2]}))
    assert got == {1: [2]}
    assert got["new"] == []


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=">i4").reshape(2, 3), np.array(3.5), np.zeros((0, 2), bool), np.float32(1.5), np.int64(-3)],
)
def test_numpy_values_come_back(array):
    got = round_trip(array)

    assert type(got) is type(array)
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@pytest.mark.slow
@given(PLAIN)
def test_any_nesting_of_plain_values_comes_back(value):
    assert round_trip(value) == value


def test_generators_of_random_numbers_go_on_where_they_were():
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    generator = np.random.default_rng(5)
    saved = round_trip({"python": python, "numpy": numpy, "torch": torch_state, "pcg": generator.bit_generator.state})
    want = random.random(), np.random.rand(), torch.rand(3).tolist(), generator.random()

    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    generator.bit_generator.state = saved["pcg"]

    assert (random.random(), np.random.rand(), torch.rand(3).tolist(), generator.random()) == want


OPTIMIZERS = [
    (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.Adam, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}), (torch.optim.LBFGS, {}), (torch.optim.Adagrad, {}), (torch.optim.NAdam, {}),
    (torch.optim.RMSprop, {}), (torch.optim.Rprop, {}), (torch.optim.Adadelta, {}), (torch.optim.Adafactor, {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda item: getattr(item, "__name__", str(item)))
def test_the_state_of_an_optimizer_comes_back(kind, options):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = kind([weight], lr=0.1, **options)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (weight**2).sum()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(loss)
    state = optimizer.state_dict()

    torch.testing.assert_close(round_trip(state), state, rtol=0, atol=0)


def test_the_state_of_schedulers_comes_back():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.MultiStepLR(optimizer, [2, 3]),
        schedulers.OneCycleLR(optimizer, 0.1, total_steps=10),
        schedulers.ReduceLROnPlateau(optimizer),
        schedulers.CosineAnnealingLR(optimizer, 5),
        schedulers.LambdaLR(optimizer, lambda epoch: 0.9),
    ):
        state = scheduler.state_dict()
        assert round_trip(state) == state


@pytest.mark.parametrize(
    "value", [object(), Colour.RED, Point(1, 2), print, np.array([object()]), type, collections.defaultdict(lambda: 1)]
)
def test_an_unknown_value_is_refused_with_its_path_and_what_to_do(value):
    with pytest.raises(StateError, match=r"\$\.callbacks\['My CB'\]\[1\].*register_type"):
        round_trip({"callbacks": {"My CB": [0, value]}})


def test_a_container_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(StateError, match="contains itself"):
        round_trip({"a": loop})


def test_a_registered_type_comes_back_and_its_name_is_taken(monkeypatch):
    monkeypatch.setattr(codec, "_registered", {})
    monkeypatch.setattr(codec, "_decoders", {})
    lazysnap.register_type(
        Registered, name="mine", encode=lambda item: {"value": item.value}, decode=lambda fields: Registered(**fields)
    )

    assert round_trip([Registered(3)])[0].value == 3
    with pytest.raises(ValueError, match="belongs to Registered"):
        lazysnap.register_type(Point, name="mine", encode=str, decode=str)
    encoded = encode(Registered(3), tensor=lambda tensor, path: "")
    codec._decoders.clear()
    with pytest.raises(StateError, match="register_type"):
        decode(encoded, tensor=lambda name: torch.ones(()))


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "os.system", "v": "true"},
        {"$": None},
        {"$": ["tuple"], "v": []},
        {"$": "tuple", "v": "abc"},
        {"$": "tuple"},
        {"$": "np.dtype", "v": "i4, (2"},
        {"$": "ndarray", "dtype": ",", "shape": [0], "v": ""},
        {"$": "ndarray", "dtype": "O", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "dtype": "f8", "shape": [5], "v": "AAAA"},
        {"$": "array", "dtype": "O", "shape": [], "v": {"$": "tensor", "v": "x"}},
        {"$": "array", "dtype": "f4", "shape": [5], "v": {"$": "tensor", "v": "x"}},
        {"$": "array", "dtype": "f4", "shape": [1], "v": "x"},
        {"$": "torch.dtype", "v": "load"},
        {"$": "torch.device", "v": "nonsense"},
        {"$": "bytes", "v": "%%%"},
        {"$": "tensor", "v": 3},
        {"$": "defaultdict", "factory": "eval", "v": []},
        {"$": "datetime", "v": 5},
        {"$": "set", "v": [[1]]},
    ],
)
def test_an_encoding_that_nobody_wrote_is_refused(encoded):
    with pytest.raises(FormatError):
        decode({"a": [encoded]}, tensor=lambda name: torch.ones(()))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(1 << 16, dtype="f4").reshape(2, -1),
        np.arange(1 << 16, dtype=">i4"),
        np.arange(1 << 16).astype("M8[s]"),
        np.full(1 << 14, "text"),
        np.arange(1 << 16)[::2],
        np.asfortranarray(np.ones((256, 256))),
        np.frombuffer(bytes(range(256)) * 512, "u2"),
    ],
    ids=["plain", "other byte order", "dates", "text", "strided", "columns", "read-only"],
)
def test_a_large_array_is_a_tensor_and_comes_back_as_it_was(array):
    walked = walk({"buffer": array})
    [tensor] = walked.tensors

    found = decode(json.loads(walked.text), tensor={"buffer": tensor}.__getitem__)["buffer"]

    assert len(walked.text) < 200
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert not np.shares_memory(found, array)


def test_an_array_whose_mask_would_be_lost_is_refused():
    with pytest.raises(StateError, match=r"\$\.masked: numpy\.ma"):
        walk({"masked": np.ma.masked_array([1, 2], [True, False])})


def big_state(step: int) -> dict:
    parameters = {f"layer.{index}": torch.full((2,), step) for index in range(3)}
    moments = {index: {"step": torch.tensor(step), "exp_avg": torch.ones(2)} for index in range(3)}
    return {
        "state_dict": collections.OrderedDict(parameters),
        "optimizer_states": [
            {"state": moments, "param_groups": [{"lr": 0.1 / step, "betas": (0.9, 0.99), "params": [0, 1]}]}
        ],
        "hyper_parameters": {"path": pathlib.Path("/x"), "odd": [1, "x"]},
        "rng": {"python": random.getstate(), "pair": (torch.ones(1), step), "empty": {}, "list": []},
        "metrics": {3: torch.tensor(step), "deque": collections.deque([torch.ones(1), step])},
        "step": step,
    }


def test_walking_again_gives_the_text_of_a_full_walk():
    walker = StateWalker()
    first = walker.walk(big_state(1))
    for step in range(2, 5):
        state = big_state(step)
        again = walker.walk(state)
        assert again.names is first.names
        full = walk(state)
        assert again.text == full.text
        assert [id(tensor) for tensor in again.tensors] == [id(tensor) for tensor in full.tensors]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["state_dict"].update(more=torch.ones(1)),
        lambda state: state["state_dict"].pop("layer.1"),
        lambda state: state["optimizer_states"].append({"state": {}}),
        lambda state: state["optimizer_states"][0]["state"][1].update(extra=5),
        lambda state: state["optimizer_states"][0]["state"][1].update(extra=torch.ones(1)),
        lambda state: state["optimizer_states"][0]["state"][1].update(step=2.0),
        lambda state: (moments := state["optimizer_states"][0]["state"][1]).update(step=moments.pop("step")),
        lambda state: state["optimizer_states"][0]["state"].update({1: {}}),
        lambda state: state["optimizer_states"][0]["state"].update({1: torch.ones(1)}),
        lambda state: state["optimizer_states"][0]["state"].update(
            {1: collections.OrderedDict(state["optimizer_states"][0]["state"][1])}
        ),
        lambda state: state["optimizer_states"][0]["state"].pop(1),
        lambda state: state["optimizer_states"][0]["state"].clear(),
        lambda state: state["rng"].update(pair=(1, torch.ones(1))),
        lambda state: state["rng"].update(empty={"now": torch.ones(1)}),
        lambda state: state["metrics"].update({"deque": collections.deque([1])}),
        lambda state: state.update(step=torch.ones(1)),
        lambda state: state.update(new={"a": 1}),
        lambda state: state.pop("metrics"),
    ],
)
def test_walking_again_notices_a_changed_structure(change):
    walker = StateWalker()
    walker.walk(big_state(1))
    state = big_state(2)
    change(state)

    again = walker.walk(state)

    full = walk(state)
    assert (again.text, again.names, again.paths) == (full.text, full.names, full.paths)
    assert [id(tensor) for tensor in again.tensors] == [id(tensor) for tensor in full.tensors]


def test_walking_again_names_the_place_of_a_value_that_turned_unknown():
    walker = StateWalker()
    walker.walk(big_state(1))
    with pytest.raises(StateError, match=r"\$\.rng\.empty\.odd"):
        walker.walk({**big_state(2), "rng": {**big_state(2)["rng"], "empty": {"odd": object()}}})


def test_decoded_tensors_are_freed_without_a_collection():
    """They are as large as the training state, and a full collection may be hours away."""
    tensors = {"x": torch.zeros(2)}
    tensor = weakref.ref(tensors["x"])
    gc.disable()
    try:
        decode([{"$": "tensor", "v": "x"}, {"$": "tuple", "v": [1]}], tensor=tensors.__getitem__)
        del tensors
        assert tensor() is None
    finally:
        gc.enable()
