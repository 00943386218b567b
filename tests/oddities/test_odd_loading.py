"""Models whose state_dict() is not what load_state_dict() takes: restored exactly, or refused at the first boundary."""

import time

import pytest
import torch
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

from lazysnap.errors import StateError

TIMEOUT_S = 60
ROWS = 2048


class Scales:
    """The numbers that turn a packed weight into floats; one of them is part of a packed entry."""

    def __init__(self, absmax, offset):
        self.absmax = absmax
        self.offset = offset

    def entries(self):
        return {"absmax": self.absmax, "packed": torch.tensor(list(repr(self.offset).encode()), dtype=torch.uint8)}

    @classmethod
    def from_dict(cls, entries, device):
        return cls(entries["absmax"].to(device), float(bytes(entries["packed"].tolist())))


class PackedWeight(torch.nn.Parameter):
    """A quantised weight: a subclass with plain memory, and scales beside it."""

    def __new__(cls, data, scales):
        weight = torch.Tensor._make_subclass(cls, data, False)
        weight.quant_state = scales
        return weight


class PackedLinear(torch.nn.Module):
    """Saves its scales, and does not load them, as layers in 4 bits do."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 255, (ROWS, 1024), dtype=torch.uint8, generator=generator)
        self.weight = PackedWeight(data, Scales(torch.rand(ROWS, 64, generator=generator), 0.1 * 3**-seed))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.weight.quant_state.entries().items():
            destination[f"{prefix}weight.{name}"] = value


def quantised(seed):
    model = torch.nn.Sequential(PackedLinear(seed), torch.nn.Linear(4, 2))
    return model, torch.optim.Adam(model[1].parameters(), lr=0.1)


def captured(engine, step):
    assert engine._wait_ready(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while not engine.boundary(step):
        assert engine._wait_ready(TIMEOUT_S)
        assert time.monotonic() < deadline


@pytest.mark.quick
def test_a_quantised_base_is_restored_exactly(engines):
    """A restart whose program quantised the base in another way gets the weights and scales of the snapshot."""
    model, optimizer = quantised(seed=1)
    engine = engines({"model": model, "optimizer": optimizer})
    for step in (1, 2):
        model[1](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        captured(engine, step)
    assert engine.close()
    other, other_optimizer = quantised(seed=2)

    assert engines({"model": other, "optimizer": other_optimizer}).restore("latest").step == 2

    wanted, restored = model.state_dict(), other.state_dict()
    assert wanted.keys() == restored.keys()
    assert all(torch.equal(wanted[name], restored[name]) for name in wanted)
    assert other[0].weight.quant_state.offset == model[0].weight.quant_state.offset


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_buffers_that_changed_their_shape_in_training_are_restored_with_it(engines):
    def observed():
        model = torch.nn.Sequential(torch.nn.Linear(8, 16))
        model.qconfig = get_default_qat_qconfig("fbgemm")
        prepare_qat(model.train(), inplace=True)
        model.register_buffer("seen", torch.zeros(0))
        return model

    model = observed()
    model(torch.randn(4, 8))  # observers have a value for each channel from now on
    model.seen = torch.arange(5.0)
    engine = engines({"model": model})
    captured(engine, 1)
    assert engine.close()
    other = observed()

    assert engines({"model": other}).restore("latest").step == 1

    wanted, restored = model.state_dict(), other.state_dict()
    assert wanted.keys() == restored.keys()
    assert all(torch.equal(wanted[name], restored[name]) for name in wanted)


def with_another_state_dict():
    model = torch.nn.Linear(2, 2)
    model.state_dict = lambda *args, **kwargs: {"adapter": torch.ones(2)}
    return model


class LeavesOut(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}bias"]


class AddsComputed(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}norm"] = self.weight.detach().norm().reshape(1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_another_state_dict, r"needs bias, weight.*returns adapter.*replaced state_dict\(\)"),
        (lambda: LeavesOut(2, 2), r"needs bias, which state_dict\(\) does not return"),
        (lambda: AddsComputed(2, 2), r"returns norm, which load_state_dict\(\) does not know"),
    ],
    ids=["replaced", "leaves out", "adds"],
)
def test_a_model_that_no_restart_could_load_is_refused_at_the_first_boundary(engines, make, reason):
    with pytest.raises(StateError, match=rf"model: no restart could load this model: .*{reason}"):
        engines({"model": make()}).boundary(1)
