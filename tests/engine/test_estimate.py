"""The size of optimizer state is known before the optimizers have made it."""

import pytest
import torch

from lazysnap.engine.estimate import copies_of, growth_bytes
from lazysnap.state.objects import ObjectState

OPTIMIZERS = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"amsgrad": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adadelta", {}),
    ("Adagrad", {}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Muon", {}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_the_state_is_as_large_as_was_estimated(name, options):
    if not hasattr(torch.optim, name):
        pytest.skip("this release of torch does not have it")
    weight = torch.nn.Parameter(torch.ones(30, 20))
    optimizer = getattr(torch.optim, name)([weight], lr=1e-3, **options)
    [group] = optimizer.param_groups
    makes_state_at_once = bool(optimizer.state[weight])  # Adagrad
    estimated = copies_of(optimizer, group)
    missing = growth_bytes(ObjectState({"model": torch.nn.ParameterList([weight]), "optimizer": optimizer}), 1 << 60)

    weight.sum().backward()
    optimizer.step()

    copies = [value for value in optimizer.state[weight].values() if value.shape == weight.shape]
    assert estimated == len(copies)
    num_missing = 1 if makes_state_at_once else 1 + len(copies)
    assert missing == weight.nbytes * num_missing
