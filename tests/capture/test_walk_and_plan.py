"""The plan covers every byte of the state once, knows what is lazy, and notices every change of the state."""

import json

import pytest
import torch
from support.slots import trainer_slot

from lazysnap.capture import plan as plan_module
from lazysnap.capture.plan import make_plan, optimizer_signature
from lazysnap.errors import ConfigError, StateError
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 6)

    def forward(self, batch):
        return self.last(self.norm(self.first(batch)))


def trained(net=None, steps=1):
    torch.manual_seed(1)
    net = net or Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        train(net, optimizer)
    return net, optimizer


def train(net, optimizer):
    optimizer.zero_grad()
    net(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()


def plan_of(source):
    walked = walk(source.collect())
    return make_plan(walked, source), walked


def record(plan, name):
    return next(item for item in plan.records if item.name == name)


def test_weights_and_moments_are_lazy_buffers_counters_and_generators_are_not():
    net, optimizer = trained()
    plan, _ = plan_of(ObjectState({"net": net, "optimizer": optimizer}))

    lazy = {item.name for item in plan.records if item.lazy}

    assert {"net.first.weight", "net.norm.weight", "optimizer.state.0.exp_avg"} <= lazy
    assert not {"net.norm.running_mean", "net.norm.num_batches_tracked", "optimizer.state.0.step", "rng.torch"} & lazy
    assert {"net.norm.running_mean", "optimizer.state.0.step", "rng.torch"} <= set(plan.names)


def test_a_parameter_in_no_optimizer_is_copied_at_the_boundary():
    net, _ = trained()
    part = torch.optim.SGD(net.last.parameters(), lr=0.1)
    plan, _ = plan_of(ObjectState({"net": net, "optimizer": part}))

    assert not record(plan, "net.first.weight").lazy
    assert record(plan, "net.last.weight").lazy


def test_a_frozen_parameter_without_elements_makes_no_other_tensor_frozen():
    """All tensors without elements have the same address."""
    net = torch.nn.Module()
    net.frozen = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
    net.register_buffer("history", torch.zeros(0))
    plan, _ = plan_of(ObjectState({"net": net}))

    assert not record(plan, "net.history").is_frozen


def test_the_tensors_fill_the_image_without_hole_or_overlap():
    net, optimizer = trained()
    plan, _ = plan_of(ObjectState({"net": net, "optimizer": optimizer}))

    position = len(plan.layout.header)
    for index in plan.order:
        assert plan.records[index].offset == position
        position += plan.records[index].nbytes

    assert position == plan.layout.size_bytes


def test_tied_weights_are_stored_once_and_known_by_both_names():
    net = Net()
    net.again = net.first
    net, optimizer = trained(net)
    plan, _ = plan_of(ObjectState({"net": net, "optimizer": optimizer}))

    assert plan.aliases["net.again.weight"] == "net.first.weight"
    assert "net.again.weight" not in plan.layout


def test_views_of_one_storage_with_other_strides_are_not_taken_for_one_tensor():
    base = torch.arange(9.0).reshape(3, 3)
    plan, walked = plan_of(ObjectState({"values": {"plain": base, "turned": base.t()}}))
    slot = trainer_slot(4096, plan.layout.size_bytes)

    views = [plan.view(slot, index) for index in range(len(plan.records))]
    for view, tensor in zip(views, walked.tensors, strict=True):
        view.copy_(tensor)

    found = dict(zip(plan.names, views, strict=True))
    assert torch.equal(found["values.plain"], base)
    assert torch.equal(found["values.turned"], base.t())


def test_names_that_read_the_same_stay_apart():
    one, two = torch.ones(1), torch.zeros(1)
    walked = walk({"a": {"b": one, 1: one}, "a.b": two, "c": {"1": two, 1: one}})

    assert len(set(walked.names)) == len(walked.names) == 5


def test_an_unchanged_state_keeps_its_plan_over_steps():
    net, optimizer = trained()
    source = ObjectState({"net": net, "optimizer": optimizer})
    plan, _ = plan_of(source)

    train(net, optimizer)
    again = walk(source.collect())

    assert plan.mismatch(again, optimizer_signature(source)) is None


def _grow(net, optimizer):
    net.first.weight.data = torch.cat([net.first.weight.data] * 2)


def _move(net, optimizer):
    net.first.weight.data = net.first.weight.data.clone()


def _convert(net, optimizer):
    net.norm.running_mean = net.norm.running_mean.double()


def _add_buffer(net, optimizer):
    net.register_buffer("queue", torch.zeros(3))


def _add_group(net, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def _rename(net, optimizer):
    net.register_buffer("other", net.norm.running_var)
    del net.norm.running_var


def _turn(net, optimizer):
    weight = torch.nn.Parameter(torch.zeros(6, 5))
    weight.data = net.first.weight.data.reshape(6, 5)
    net.first.weight = weight


def _stretch(net, optimizer):
    net.register_buffer("table", torch.zeros(2, 3).t())


def _widen_moment(net, optimizer):
    state = optimizer.state[net.first.weight]
    state["exp_avg"].data = state["exp_avg"].double()


def _move_moment(net, optimizer):
    state = optimizer.state[net.first.weight]
    state["exp_avg"].data = state["exp_avg"].clone()


def _negate(net, optimizer):
    optimizer.state[net.first.weight]["step"] = torch.complex(torch.tensor(1.0), torch.tensor(3.0)).conj().imag


CHANGES = [_grow, _move, _convert, _add_buffer, _add_group, _rename]
CHANGES += [_turn, _stretch, _widen_moment, _move_moment, _negate]


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_state_is_noticed(change, has_guards, monkeypatch):
    if not has_guards:  # as with a release of torch that has no such check
        monkeypatch.setattr(plan_module, "_TensorGuards", None)
    net, optimizer = trained()
    net.register_buffer("table", torch.zeros(3, 2))
    source = ObjectState({"net": net, "optimizer": optimizer})
    plan, _ = plan_of(source)

    change(net, optimizer)
    walked = walk(source.collect())

    assert plan.mismatch(walked, optimizer_signature(source))
    fresh = make_plan(walked, source)
    assert fresh.mismatch(walked, optimizer_signature(source)) is None


def test_what_the_plan_does_not_depend_on_may_change():
    """Memory of an eager tensor; where the fast comparison says no, the other one decides."""
    net, optimizer = trained()
    source = ObjectState({"net": net, "optimizer": optimizer})
    plan, walked = plan_of(source)
    assert plan.is_alike(walked.tensors)

    net.norm.running_mean = net.norm.running_mean.clone()
    with torch.autocast("cpu"):
        walked = walk(source.collect())
        assert not plan.is_alike(walked.tensors)

        assert plan.mismatch(walked, optimizer_signature(source)) is None


def test_untied_weights_are_noticed():
    net = Net()
    net.again = net.first
    net, optimizer = trained(net)
    source = ObjectState({"net": net, "optimizer": optimizer})
    plan, _ = plan_of(source)

    net.again = torch.nn.Linear(6, 5)

    assert plan.mismatch(walk(source.collect()), optimizer_signature(source))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 2).to_sparse(), torch.empty(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_cannot_be_captured_is_refused_with_its_place(tensor):
    with pytest.raises(StateError, match=r"\$\.values\.odd"):
        plan_of(ObjectState({"values": {"odd": tensor}}))


def test_an_unknown_object_is_refused_with_its_place():
    with pytest.raises(StateError, match=r"\$\.values\.thing"):
        walk(ObjectState({"values": {"thing": object()}}).collect())


def test_the_skeleton_is_json():
    net, optimizer = trained()
    walked = walk(ObjectState({"net": net, "optimizer": optimizer}).collect())

    assert json.loads(json.dumps(walked.skeleton))["net"]["first.weight"] == {"$": "tensor", "v": "net.first.weight"}


@pytest.mark.parametrize(("name", "value"), [("rng", {}), ("net", 3), ("net", None)])
def test_objects_without_a_state_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        ObjectState({name: value})
