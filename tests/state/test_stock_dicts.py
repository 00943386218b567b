"""The fast ways to the state of modules and optimizers give what ``state_dict()`` gives."""

import functools
from collections import OrderedDict

import pytest
import torch

from lazysnap.state.stock_dicts import state_of_module, state_of_optimizer


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4, bias=False)
        self.layers = torch.nn.ModuleList([torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)])
        self.tied = self.first
        self.missing = None
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("passing", torch.arange(3), persistent=False)
        self.register_buffer("none", None)
        self.weights = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2))})


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self):
        return {"extra": 1}

    def set_extra_state(self, state):
        pass


class WithOwnDict(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return OrderedDict((name, value * 2) for name, value in state.items())


class WithOwnSaving(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "other"] = self.weight.detach()


def plain():
    return Net()


def with_child(kind):
    net = Net()
    net.layers.append(kind(2, 2))
    return net


def with_hook():
    net = Net()

    def drop_bias(module, state, prefix, metadata):
        del state[f"{prefix}bias"]

    net.layers[0].register_state_dict_post_hook(drop_bias)
    return net


def with_pre_hook():
    net = Net()
    net.layers[1].register_state_dict_pre_hook(lambda module, prefix, keep_vars: module.register_buffer("b", None))
    return net


def with_replaced_method():
    net = Net()
    net.state_dict = lambda **options: {"only": torch.ones(1)}
    return net


def scripted():
    return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))


def parametrized():
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))


def lazy():
    return torch.nn.Sequential(torch.nn.LazyLinear(2))


MODULES = [
    plain,
    *(functools.partial(with_child, kind) for kind in (WithExtraState, WithOwnDict, WithOwnSaving)),
    with_hook,
    with_pre_hook,
    with_replaced_method,
    pytest.param(scripted, marks=pytest.mark.filterwarnings("ignore")),
    parametrized,
    lazy,
]


@pytest.mark.parametrize("make", MODULES)
def test_the_state_of_a_module_is_that_of_its_state_dict(make):
    module = make()
    expected = module.state_dict()

    state = state_of_module(module)

    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is type(value), name
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.parameter.UninitializedParameter):
            assert not state[name].requires_grad
            assert state[name]._version == value._version
            assert torch.equal(state[name], value), name


def test_tensors_of_the_state_are_aliases_that_share_memory_and_version():
    net = Net()
    state = state_of_module(net)
    with torch.no_grad():
        net.first.weight.add_(1)

    assert state["first.weight"].data_ptr() == net.first.weight.data_ptr()
    assert state["first.weight"]._version == net.first.weight._version
    assert state["first.weight"] is not net.first.weight


class WithOwnState(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "own": 1}


def parameters():
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]


def two_groups():
    tensors = parameters()
    return torch.optim.AdamW([{"params": tensors[:2], "lr": 1.0}, {"params": tensors[2:]}])


def with_duplicates():
    tensors = parameters()
    with pytest.warns(UserWarning, match="duplicate"):
        return torch.optim.SGD([*tensors, tensors[0]], lr=0.1, momentum=0.9)


def with_other_keys():
    optimizer = two_groups()
    optimizer.state["count"] = 3
    return optimizer


def with_own_state():
    return WithOwnState(parameters(), lr=0.1, momentum=0.9)


def with_post_hook():
    optimizer = two_groups()
    optimizer.register_state_dict_post_hook(lambda self, state: {**state, "hooked": True})
    return optimizer


@pytest.mark.parametrize("make", [two_groups, with_duplicates, with_other_keys, with_own_state, with_post_hook])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_the_state_of_an_optimizer_is_that_of_its_state_dict(make, has_stepped):
    optimizer = make()
    if has_stepped:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones(2)
        optimizer.step()
    expected = optimizer.state_dict()

    state = state_of_optimizer(optimizer)

    assert list(state) == list(expected)
    assert state["param_groups"] == expected["param_groups"]
    assert list(state["state"]) == list(expected["state"])
    assert all(state["state"][key] is value for key, value in expected["state"].items())
    assert {**state, "state": 0, "param_groups": 0} == {**expected, "state": 0, "param_groups": 0}
