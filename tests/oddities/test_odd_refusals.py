"""What cannot be captured or restored rightly is refused by name, before anything is trained or loaded."""

import time

import pytest
import torch
from torch.utils import _pytree as pytree

from lazysnap.errors import StateError

TIMEOUT_S = 60


class Wrapper(torch.Tensor):
    """A tensor round another one, as quantized weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def opened(item):
            return item.inner if isinstance(item, cls) else item

        found = function(*pytree.tree_map(opened, args), **pytree.tree_map(opened, kwargs or {}))
        return pytree.tree_map(lambda item: cls(item) if isinstance(item, torch.Tensor) else item, found)


class Flattening(Wrapper):
    """One that says what is in it, as torchao's do."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner["inner"])


KINDS = {
    "layout torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "layout torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "dtype torch.qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "dtype torch.int4": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.int4),
    "dtype torch.bits8": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested tensor": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "the subclass Wrapper": lambda: Wrapper(torch.ones(3)),
    "the subclass Flattening": lambda: Flattening(torch.ones(3)),
}  # fmt: skip


def odd_model(kind):
    model = torch.nn.Linear(2, 2)
    tensor = KINDS[kind]()
    if tensor.is_floating_point() and "quint" not in kind:
        model.odd = torch.nn.Parameter(tensor)
    else:
        model.register_buffer("odd", tensor)
    return model


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated).*")
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_no_snapshot_can_hold_is_refused_before_the_first_step(engines, kind):
    model = odd_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for call in (lambda engine: engine.restore("latest"), lambda engine: engine._prepare()):
        with pytest.raises(StateError, match=rf"model\.odd: .*{kind}"):
            call(engines({"model": model, "optimizer": optimizer}))
    # Also where it is no part of a module, and the program did not ask before.
    with pytest.raises(StateError, match=rf"values\.odd: .*{kind}"):
        engines({"values": {"odd": KINDS[kind]()}}).boundary(1)


def test_a_model_on_the_meta_device_is_refused_before_it_is_trained(engines):
    """A first start that went well would end in a restart that cannot load anything."""
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    engine = engines({"model": model})

    for call in (engine.restore, engine._prepare):
        with pytest.raises(StateError, match=r"model\.weight.*meta device.*to_empty"):
            call()

    model.to_empty(device="cpu")
    assert engine.restore("latest") is None
    engine._prepare()
    # Also where it is no part of a module, and the program did not ask before.
    with pytest.raises(StateError, match=r"values\.odd.*meta device.*to_empty|\['odd'\].*meta device"):
        engines({"values": {"odd": torch.empty(2, device="meta")}}).boundary(1)


def test_a_lazy_module_that_saw_no_batch_is_refused_at_the_first_boundary(engines):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    engine = engines({"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    engine._prepare()

    with pytest.raises(StateError, match=r"\['1\.weight'\].*no batch yet"):
        engine.boundary(1)


def captured(engines, state, step=1):
    engine = engines(state)
    assert engine._wait_ready(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while not engine.boundary(step):
        assert engine._wait_ready(TIMEOUT_S)
        assert time.monotonic() < deadline
    assert engine.close()


def test_nothing_is_loaded_into_a_model_on_the_meta_device(engines):
    captured(engines, {"model": torch.nn.Linear(2, 2)})
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    engine = engines({"model": model})

    with pytest.raises(StateError, match=r"model\.weight.*meta device.*to_empty"):
        engine.restore("latest")
    with pytest.raises(StateError, match=r"model\.weight.*meta device.*to_empty"):
        engine._fetch("latest")

    model.to_empty(device="cpu")
    assert engine.restore("latest").step == 1


def trained(*groups):
    """Two layers and an optimizer; ``groups``: the numbers of the layers in each of its groups."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    held = [[one for number in group for one in model[number].parameters()] for group in groups]
    optimizer = torch.optim.AdamW([{"params": params} for params in held], lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ([[0], [1]], [[0]], "the snapshot has 2 parameter group.*add_param_group"),
        ([[0]], [[0], [1]], "the snapshot has 1 parameter group.*add_param_group"),
        # As many and as large as there: only the names tell.
        ([[0, 1]], [[1, 0]], r"parameter 0 is 1\.weight, in the snapshot it is 0\.weight"),
    ],
    ids=["more groups", "fewer groups", "another order"],
)
def test_an_optimizer_with_other_groups_or_another_order_is_named_and_nothing_is_loaded(engines, there, here, said):
    model, optimizer = trained(*there)
    captured(engines, {"model": model, "adam": optimizer})
    model, optimizer = trained(*here)
    with torch.no_grad():
        model[0].weight.zero_()

    with pytest.raises(StateError, match=f"adam: {said}"):
        engines({"model": model, "adam": optimizer}).restore("latest")

    assert not model[0].weight.any()


def images(*, is_channels_last, **settings):
    """A convolution after one step of AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 2)
    if is_channels_last:
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    model(torch.randn(2, 3, 4, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("is_channels_last", [True, False], ids=["channels last", "row-major"])
def test_another_memory_order_is_refused_where_a_fused_optimizer_would_ignore_it(engines, is_channels_last):
    model, optimizer = images(is_channels_last=is_channels_last, fused=True)
    captured(engines, {"model": model, "adam": optimizer})
    model, optimizer = images(is_channels_last=not is_channels_last, fused=True)
    with torch.no_grad():
        model.weight.zero_()

    with pytest.raises(StateError, match=r"adam: model\.weight has another memory order .*AdamW may ignore strides"):
        engines({"model": model, "adam": optimizer}).restore("latest")

    assert not model.weight.any()


def test_another_memory_order_is_named_and_the_values_come_back_in_place(engines, caplog):
    model, optimizer = images(is_channels_last=True, foreach=True)
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    captured(engines, {"model": model, "adam": optimizer})
    live, live_optimizer = images(is_channels_last=False, foreach=True)
    live.register_buffer("turned", torch.zeros(3, 2))
    weight = live.weight

    engines({"model": live, "adam": live_optimizer}).restore("latest")

    assert live.weight is weight
    assert weight.is_contiguous()
    assert torch.equal(weight, model.weight)
    assert torch.equal(live.turned, model.turned)
    moment = live_optimizer.state[weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moment, optimizer.state[model.weight]["exp_avg"])
    assert "model.weight has another memory order (strides) than in the snapshot, 2 tensors in all" in caplog.text


@pytest.mark.parametrize("value", [torch.full((3,), 7.0), torch.arange(3.0)], ids=["one value", "values of its own"])
def test_an_expanded_buffer_gets_the_values_of_the_snapshot(engines, value):
    """Where its one place in memory cannot hold them, it gets memory of its own."""
    model = torch.nn.Module()
    model.register_buffer("mask", value)
    captured(engines, {"model": model, "loose": {"mask": value}})
    model = torch.nn.Module()
    model.register_buffer("mask", torch.zeros(1).expand(3))
    loose = {"mask": torch.zeros(1).expand(3)}

    engines({"model": model, "loose": loose}).restore("latest")

    assert torch.equal(model.mask, value)
    assert torch.equal(loose["mask"], value)


def test_an_expanded_parameter_gets_the_values_of_the_snapshot(engines):
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.full((1,), 7.0).expand(3), requires_grad=False)
    captured(engines, {"model": model})
    model.scale = torch.nn.Parameter(torch.zeros(1).expand(3), requires_grad=False)

    engines({"model": model}).restore("latest")

    assert torch.equal(model.scale, torch.full((3,), 7.0))


def test_parameters_that_are_trained_and_in_no_part_of_the_state_are_told_of(engines, caplog):
    model, loose = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)

    captured(engines, {"model": model, "sgd": optimizer})

    assert [record.message for record in caplog.records if "1 parameters of sgd are in no part" in record.message]


class Averaging(torch.optim.SGD):
    """An optimizer with another one inside, which does the steps."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        return self.base.step(closure)


@pytest.mark.parametrize("case", ["replaced", "inner", "of another model"])
def test_an_optimizer_that_trains_in_the_place_of_a_captured_one_is_named_at_the_next_boundary(engines, caplog, case):
    model = torch.nn.Linear(2, 2)
    optimizer = Averaging(model.parameters()) if case == "inner" else torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engines({"model": model, "optimizer": optimizer})
    engine.boundary(1)
    stepping = [optimizer]
    if case == "replaced":
        stepping = [torch.optim.Adam(model.parameters())]
    elif case == "of another model":
        stepping.append(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()))
    model(torch.ones(1, 2)).sum().backward()
    for trained in stepping:
        trained.step()

    engine.boundary(2)

    named = [
        record.message for record in caplog.records if "trains parameters of a captured optimizer" in record.message
    ]
    assert len(named) == (case == "replaced")
    assert all(message.startswith("Adam, which is not part of the state") for message in named)
