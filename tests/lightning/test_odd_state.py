"""Unusual state in a fit: memory orders, torch.compile, parameter groups; what cannot be captured is refused."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from test_callback import DieAt, finish, fit, raising

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.errors import StateError


class Convolutional(pl.LightningModule):
    """Channels last and fused, with a buffer that is expanded and a part known by two names."""

    def __init__(self, *, seed=0, is_compiled=False):
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 2, bias=False), torch.nn.Conv2d(4, 3, 2))
        self.again = self.net[1]
        self.net.to(memory_format=torch.channels_last)
        self.register_buffer("mean", torch.zeros(1, 2).expand(3, 2))
        if is_compiled:
            self.net = torch.compile(self.net, backend="eager")

    def training_step(self, batch, batch_idx):
        pictures = batch[1].reshape(-1, 1, 3, 1).expand(-1, 1, 3, 3).contiguous(memory_format=torch.channels_last)
        out = self.net(pictures)
        self.mean[:1] += out.detach().mean()
        return (out - self.mean[0, 0]).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def names_apart(state):
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def test_moments_lie_as_their_parameters_do_after_a_restart(tmp_path):
    whole = finish(*fit(tmp_path / "whole", model=Convolutional()))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "cut", DieAt(5, raising(ZeroDivisionError())), model=Convolutional())

    trainer, model = fit(tmp_path / "cut", seed=99, model=Convolutional(seed=5))

    assert finish(trainer, model) == whole
    moment = trainer.optimizers[0].state[model.net[1].weight]["exp_avg"]
    assert moment.stride() == torch.zeros_like(model.net[1].weight).stride()
    assert model.net[1].weight is model.again.weight


@pytest.mark.parametrize("first", [True, False], ids=["compiled first", "compiled then"])
def test_a_fit_goes_on_with_and_without_torch_compile(tmp_path, first):
    _, whole = fit(tmp_path / "whole", model=Convolutional())
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "cut", DieAt(5, raising(ZeroDivisionError())), model=Convolutional(is_compiled=first))

    _, model = fit(tmp_path / "cut", seed=99, model=Convolutional(seed=5, is_compiled=not first))

    one, other = names_apart(whole.state_dict()), names_apart(model.state_dict())
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class Grouped(Convolutional):
    def __init__(self, groups):
        super().__init__()
        self.groups = groups

    def configure_optimizers(self):
        parts = list(self.net.parameters())
        groups = [parts] if self.groups == 1 else [parts[:1], parts[1:]]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


class Turned(Grouped):
    def configure_optimizers(self):
        return torch.optim.SGD(list(self.net.parameters())[:: 1 if self.groups == 1 else -1], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "first", "then", "said"),
    [
        (Grouped, 2, 1, "the snapshot has 2 parameter groups"),
        (Turned, 1, 2, r"parameter 0 is net\.1\.bias"),
    ],
    ids=["other groups", "another order"],
)
def test_an_optimizer_of_other_groups_or_another_order_is_refused_by_name(tmp_path, kind, first, then, said):
    fit(tmp_path, model=kind(first))

    with pytest.raises(StateError, match=rf"optimizer_states\.0: {said}"):
        fit(tmp_path, model=kind(then), max_epochs=3)


class Sparse(Convolutional):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.odd = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_a_tensor_that_cannot_be_captured_is_refused_before_the_first_batch(tmp_path):
    model = Sparse()

    with pytest.raises(StateError, match=r"state_dict\.odd: .*layout torch\.sparse_coo"):
        fit(tmp_path, model=model)

    assert model.steps == 0


def test_a_fit_whose_first_capture_is_of_a_pruned_model_goes_on(tmp_path):
    config = SnapshotConfig(every_n_steps=100, levels=(PersistentLevel(tmp_path / "snapshots"),))
    fit(tmp_path, ModelPruning("l1_unstructured", amount=0.5), config=config, max_epochs=1)
    never_again = DieAt(3, raising(ZeroDivisionError()))

    trainer, _ = fit(tmp_path, ModelPruning("l1_unstructured", amount=0.5), never_again, config=config)

    assert trainer.global_step == 12
