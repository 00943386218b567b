"""An optimizer gets the state of another kind of optimizer never, and of the same kind always."""

import copy

import pytest
import torch

from lazysnap.errors import StateError
from lazysnap.state.objects import ObjectState


def made(kind, step=True, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    if step:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return ObjectState({"model": model, "optimizer": optimizer}), model, optimizer


def saved(kind, **options):
    source, _, _ = made(kind, **options)
    state = source.collect()
    state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
    return state


class AdamW(torch.optim.Optimizer):
    """Of another package, and with a state of its own."""

    def __init__(self, parameters, lr=1e-3, decay_steps=5):
        super().__init__(parameters, {"lr": lr, "decay_steps": decay_steps})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("rows", torch.zeros(1)).add_(group["decay_steps"])


class Wrapped(AdamW):
    pass


Wrapped.__name__ = "AdamW"
Moved = type("AdamW", (AdamW,), {"__module__": "moved.elsewhere"})
# What a wrapper such as Horovod's makes of a class.
Distributed = type("SGD", (torch.optim.SGD,), {"__module__": "horovod.torch.optimizer"})


@pytest.mark.parametrize(
    ("there", "here", "options"),
    [
        (torch.optim.AdamW, torch.optim.SGD, {}),
        (torch.optim.SGD, torch.optim.AdamW, {}),
        (torch.optim.Adam, torch.optim.AdamW, {}),
        (torch.optim.AdamW, AdamW, {}),
        (AdamW, torch.optim.AdamW, {}),
        (torch.optim.SGD, torch.optim.RMSprop, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_another_class_is_refused_and_nothing_is_loaded(there, here, options, stepped):
    source, model, optimizer = made(here, step=stepped, **options)
    state = saved(there)
    state["model"]["weight"] += 1
    before = model.weight.clone(), [group["lr"] for group in optimizer.param_groups], len(optimizer.state)

    with pytest.raises(StateError, match=rf"optimizer: .*{there.__name__}.*{here.__name__}.*Nothing") as caught:
        source.load(state)

    assert "load_weights" in str(caught.value)
    assert (model.weight.equal(before[0]), [group["lr"] for group in optimizer.param_groups]) == (True, before[1])
    assert len(optimizer.state) == before[2]


def test_other_state_of_a_class_by_that_name_is_refused():
    state = saved(AdamW)
    for one in state["optimizer"]["state"].values():
        one["columns"] = one.pop("rows")
    source, _, _ = made(AdamW)

    with pytest.raises(StateError, match="holds rows for its parameters, the snapshot columns"):
        source.load(state)


@pytest.mark.parametrize(
    ("there", "of_there", "here", "of_here"),
    [
        (torch.optim.AdamW, {}, torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}, torch.optim.AdamW, {"fused": False}),
        (torch.optim.AdamW, {}, torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {}, torch.optim.AdamW, {"betas": (0.8, 0.9), "lr": 5e-4}),
        (torch.optim.SGD, {}, torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}, Distributed, {}),
        (Distributed, {}, torch.optim.SGD, {}),
        (AdamW, {}, Moved, {}),
        (AdamW, {}, Wrapped, {}),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_the_same_class_is_taken_however_it_is_configured_wrapped_or_imported(there, of_there, here, of_here, stepped):
    source, _, optimizer = made(here, step=stepped, **of_here)
    state = saved(there, **of_there)
    expected = copy.deepcopy(state["optimizer"]["state"])

    source.load(state)

    torch.testing.assert_close(optimizer.state_dict()["state"], expected, rtol=0, atol=0)
    optimizer.step()


def test_a_switch_that_torch_added_since_may_be_missing():
    state = saved(torch.optim.AdamW)
    for group in state["optimizer"]["param_groups"]:
        del group["foreach"], group["decoupled_weight_decay"]
    expected = copy.deepcopy(state["optimizer"]["state"])
    source, _, optimizer = made(torch.optim.AdamW, step=False)

    source.load(state)

    torch.testing.assert_close(optimizer.state_dict()["state"], expected, rtol=0, atol=0)


def test_the_second_of_two_optimizers_is_compared_too():
    def two(kind):
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        return ObjectState(
            {
                "a": first,
                "b": second,
                "of a": torch.optim.SGD(first.parameters()),
                "of.b": kind(second.parameters()),
            }
        )

    with pytest.raises(StateError, match=r"of\.b: the snapshot is of .*Adagrad, .*SGD"):
        two(torch.optim.SGD).load(two(torch.optim.Adagrad).collect())
