"""Tensors in dicts that are given as state."""

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from lazysnap.errors import StateError
from lazysnap.state.codec import decode, encode
from lazysnap.state.objects import ObjectState


def functional(seed):
    torch.manual_seed(seed)
    params = {"w": torch.randn(3, 3, requires_grad=True), "layers": [torch.zeros(3, requires_grad=True)]}
    optimizer = torch.optim.Adam([params["w"], *params["layers"]], lr=0.1)
    return params, optimizer, ObjectState({"params": params, "optimizer": optimizer, "progress": {"step": seed}})


def train(params, optimizer):
    loss = (torch.randn(2, 3) @ params["w"] + params["layers"][0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def snapshot(source):
    tensors = {}

    def keep(tensor, path):
        tensors[str(path)] = tensor.detach().clone()
        return str(path)

    return decode(encode(source.collect(), tensor=keep), tensor=tensors.__getitem__)


def test_parameters_in_a_dict_are_restored_where_the_optimizer_holds_them():
    params, optimizer, source = functional(seed=1)
    train(params, optimizer)
    state = snapshot(source)
    wanted = [train(params, optimizer) for _ in range(3)]
    params, optimizer, source = functional(seed=2)
    live = [params["w"], params["layers"][0]]
    params["only here"] = torch.ones(1)

    source.load(state)

    assert params["w"] is live[0]
    assert params["layers"][0] is live[1]
    assert [*params] == ["w", "layers"]
    assert [train(params, optimizer) for _ in range(3)] == wanted


class Progress(dict):
    pass


@pytest.mark.parametrize("kind", [dict, Progress, OrderedDict, Counter, lambda values: defaultdict(int, values)])
def test_a_dict_of_any_class_is_restored(kind):
    state = snapshot(ObjectState({"progress": kind({"step": 7})}))
    live = kind({"step": 0, "only here": 1})

    ObjectState({"progress": live}).load(state)

    assert dict(live) == {"step": 7}


def test_a_trained_tensor_of_another_shape_is_named_and_nothing_is_loaded():
    state = snapshot(functional(seed=1)[2])
    params, _, source = functional(seed=2)
    params["layers"][0] = torch.zeros(4, requires_grad=True)
    before = params["w"].detach().clone()

    with pytest.raises(StateError, match=r"params.*layers.*float32 \[3\].*float32 \[4\]"):
        source.load(state)

    assert torch.equal(params["w"], before)


@pytest.mark.parametrize("saved", [[1, 2], 3, None])
def test_what_was_no_dict_in_the_snapshot_is_refused(saved):
    """Nothing was loaded, and nothing was said."""
    *_, source = functional(seed=1)
    state = {**snapshot(source), "progress": saved}
    before = snapshot(source)

    with pytest.raises(
        StateError, match=rf"\$\.progress: the snapshot has {type(saved).__name__} .*Nothing was loaded"
    ):
        source.load(state)

    assert torch.equal(snapshot(source)["params"]["w"], before["params"]["w"])
