"""Two captures of one step are compared: what differs is named, and by how much."""

import math

import pytest
import torch
from small_training import TIMEOUT_S
from support.slots import trainer_slot

from lazysnap.capture.capture import Capture
from lazysnap.capture.captures import Captures
from lazysnap.capture.plan import make_plan
from lazysnap.engine.restart_check import _Comparison
from lazysnap.errors import FormatError
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

RUN = "1" * 16


@pytest.fixture
def captured():
    """Returns a whole capture of some tensors."""
    captures = Captures()
    slots = []

    def capture_of(tensors):
        walked = walk({"weights": tensors})
        plan = make_plan(walked, ObjectState({}))
        meta = CaptureMeta(RUN, RUN, 1, 0, 1, 3, tensors=plan.logical)
        slots.append(trainer_slot(1 << 16, plan.layout.size_bytes))
        capture = Capture(plan, slots[-1], 1, walked.tensors, sequence=1)
        slots[-1].begin(int(RUN, 16), 1, sequence=1, image_bytes=plan.layout.size_bytes, meta=meta.to_bytes())
        captures.begin(capture)
        captures.finish(TIMEOUT_S)
        assert capture.released.wait(TIMEOUT_S)
        return capture

    yield capture_of
    captures.close(TIMEOUT_S)


@pytest.fixture
def comparison(captured):
    """Returns the comparison of two values of one weight."""

    def comparison_of(before, after):
        expected = captured({"weight": before})
        return _Comparison(expected.slot, captured({"weight": after}), ())

    return comparison_of


@pytest.fixture
def difference(comparison):
    def difference_of(before, after):
        compared = comparison(before, after)
        compared.run()
        assert compared.difference is not None, compared.failure
        return compared.difference

    return difference_of


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 50_000])
def test_a_weight_that_is_not_finite_on_one_side_differs_without_limit(difference, bad, index):
    after = torch.ones(70_000)
    after[index] = bad
    found = difference(torch.ones(70_000), after)

    assert found.text == "tensors: weights.weight by inf"
    assert "not deterministic" not in found.usual_cause


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e5m2fnuz]
)
def test_weights_of_every_dtype_are_compared_as_numbers(difference, dtype):
    before = torch.ones(5, 2).to(dtype)
    after = before.clone()
    after[3, 1] = 2

    assert difference(before, after).text == "tensors: weights.weight by 0.5"


def test_the_imaginary_part_counts(difference):
    assert difference(torch.ones(3) * 2j, torch.ones(3) * 4j).text == "tensors: weights.weight by 0.5"


def test_integers_are_no_weights(difference):
    assert difference(torch.arange(3), torch.ones(3, dtype=torch.int64)).text == "small state: weights.weight"


def test_a_comparison_that_was_cancelled_says_why_whatever_it_meets(comparison, monkeypatch):
    """Its slots are written over by then."""
    compared = comparison(torch.zeros(3), torch.zeros(3))
    compared.is_cancelled = True
    compared.run()
    assert (compared.difference, compared.failure) == (None, "its slots were needed for the next capture")

    def damaged(data):
        raise FormatError("a slot was written over")

    monkeypatch.setattr(CaptureMeta, "from_bytes", damaged)
    compared.run()
    assert compared.failure == "its slots were needed for the next capture"
