"""Which tensors count as frozen, what file they make, and how a change is noticed."""

import pytest
import safetensors.torch
import torch

from lazysnap.capture.frozen import LEAST_BYTES, FrozenSet, digest_of, frozen_parameters, slices_of
from lazysnap.capture.plan import make_plan
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

WIDTH = 640  # a weight of 1.6 MB


class Base(torch.nn.Module):
    """A frozen base, a buffer, and an adapter that is trained."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.second = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)
        self.adapter = torch.nn.Linear(WIDTH, 2)


class Case:
    def __init__(self, model=None, **more):
        torch.manual_seed(1)
        self.model = model or Base()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)
        self.source = ObjectState({"model": self.model, "optimizer": self.optimizer, **more})

    def walk(self):
        return walk(self.source.collect())

    def choose(self, **settings):
        walked = self.walk()
        return chosen_from(list(zip(walked.names, walked.tensors, strict=True)), self.source, **settings)

    def names(self, **settings):
        chosen = self.choose(**settings)
        return [] if chosen is None else sorted(chosen.all_names())


ALL = ["model.first.bias", "model.first.weight", "model.second.bias", "model.second.weight"]


def chosen_from(named, source, **settings):
    return FrozenSet.of(frozen_parameters(named, source, **settings), named)


def copy_of(chosen):
    """Its file, and the digest that was made while it was copied."""
    room = memoryview(bytearray(chosen.size_bytes))
    return room, digest_of(chosen.copied_into(room))


def digest(chosen):
    return digest_of(chosen.pieces())


def test_parameters_that_need_no_gradient_and_no_optimizer_holds_are_frozen():
    assert Case().names() == ALL


def test_what_an_optimizer_holds_is_not_frozen_even_without_a_gradient():
    case = Case()
    case.optimizer.add_param_group({"params": [case.model.first.weight]})

    assert case.names() == [name for name in ALL if name != "model.first.weight"]


def test_few_bytes_are_not_worth_it():
    small = torch.nn.Linear(8, 8).requires_grad_(False)
    assert sum(parameter.nbytes for parameter in small.parameters()) < LEAST_BYTES

    case = Case(torch.nn.Sequential(small, torch.nn.Linear(8, 8)))

    assert case.names() == []


def test_what_was_found_changed_stays_out():
    assert Case().names(changed={"model.first.weight"}) == [name for name in ALL if name != "model.first.weight"]


def test_buffers_are_never_frozen():
    model = Base()
    model.register_buffer("table", torch.zeros(WIDTH, WIDTH))

    assert Case(model).names() == ALL


def test_weights_tied_to_trained_ones_or_to_buffers_are_not_frozen():
    model = Base()
    model.head = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    model.first.weight = torch.nn.Parameter(model.head.weight.detach(), requires_grad=False)
    model.register_buffer("table", model.second.weight.detach().view(-1)[10:])

    assert Case(model).names() == []
    model.third = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    assert Case(model).names() == ["model.first.bias", "model.second.bias", "model.third.weight"]


def test_frozen_weights_tied_to_each_other_are_stored_once():
    model = Base()
    model.second.weight = model.first.weight
    case = Case(model, also=model)

    chosen = case.choose()

    assert sorted(chosen.all_names()) == sorted([*ALL, *(name.replace("model", "also") for name in ALL)])
    assert chosen.size_bytes < 2 * model.first.weight.nbytes
    assert chosen.aliases["model.second.weight"] == "also.first.weight"


def test_the_file_is_a_safetensors_file_and_its_name_the_digest_of_its_bytes(tmp_path):
    model = Base()
    model.odd = torch.nn.Parameter(torch.randn(7, 3).to(torch.bfloat16), requires_grad=False)
    model.wide = torch.nn.Parameter(torch.complex(torch.randn(5).double(), torch.randn(5).double()), False)
    case = Case(model)
    chosen = case.choose()

    room, copied = copy_of(chosen)

    (tmp_path / "x").write_bytes(room)
    tensors = safetensors.torch.load_file(tmp_path / "x")
    assert sorted(tensors) == sorted(chosen.names)
    assert tensors["model.odd"].equal(model.odd.data)
    assert torch.view_as_complex(tensors["model.wide"]).equal(model.wide.data)
    assert chosen.logical == {"model.wide": {"dtype": "complex128"}}
    assert digest(chosen) == copied == Checksums.of(room).whole


@pytest.mark.slow
def test_files_of_many_blocks_have_the_same_digest_in_pieces_and_as_a_whole():
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randint(0, 255, (size,), dtype=torch.uint8), requires_grad=False)
        for size in (BLOCK_BYTES - 4096, 1, BLOCK_BYTES, 3_000_001)
    )
    chosen = Case(torch.nn.ModuleList([model, torch.nn.Linear(2, 2)])).choose()

    room, copied = copy_of(chosen)

    assert len(room) > 2 * BLOCK_BYTES
    assert digest(chosen) == copied == Checksums.of(room).whole
    assert digest_of(slices_of(room)) == copied


def test_the_same_tensors_make_the_same_file_whatever_their_order():
    case = Case()
    walked = list(zip(case.walk().names, case.walk().tensors, strict=True))

    one, other = chosen_from(walked, case.source), chosen_from(walked[::-1], case.source)

    assert one.is_like(other)
    assert digest(one) == digest(other)


@torch.no_grad()
def _average(model):
    model.first.weight.mul_(0.5)


def _replace(model):
    model.first.weight.data = model.first.weight.data.clone()


@torch.no_grad()
def _write(model):
    model.first.weight[3, 3] = 7


@torch.no_grad()
def _small(model):
    model.first.bias.add_(1e-3)


@pytest.mark.parametrize("change", [_average, _replace, _write, _small])
def test_a_change_is_noticed_by_name(change):
    case = Case()
    chosen = case.choose()
    assert chosen.changed() == []

    change(case.model)

    assert chosen.changed() == ["model.first.bias" if change is _small else "model.first.weight"]


def test_parameters_that_an_optimizer_got_hold_of_or_that_need_a_gradient_are_told():
    case = Case()
    chosen = case.choose()
    assert chosen.trained(case.source.optimizers()) == []

    case.optimizer.param_groups[0]["params"][0] = case.model.second.weight
    case.model.first.bias.requires_grad_(True)

    assert sorted(chosen.trained(case.source.optimizers())) == ["model.first.bias", "model.second.weight"]
    assert chosen.changed() == []


def test_the_plan_holds_only_the_rest():
    case = Case()
    walked, chosen = case.walk(), case.choose()

    plan = make_plan(walked, case.source, chosen)

    stored = {spec.name for spec in plan.layout.specs}
    assert {"model.adapter.weight", "model.norm.running_mean"} <= stored
    assert stored.isdisjoint(ALL)
    assert plan.layout.size_bytes < chosen.size_bytes / 100
    assert [record.name for record in plan.records if record.frozen] == [name for name in walked.names if name in ALL]
    assert plan.mismatch(case.walk(), plan.signature) is None
    case.model.first.weight = torch.nn.Parameter(case.model.first.weight.detach().clone(), requires_grad=False)
    assert "place" in plan.mismatch(case.walk(), plan.signature)
