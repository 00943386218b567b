"""The interface between a training loop and the engine: what the training state is, and how it is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lazysnap.state.loading import resizable_names
from lazysnap.state.wrappers import ddp_of, stepping, unwrapped, without_compiled

KEY = "lazysnap"
"""The key in a state that holds what lazysnap adds to it."""
OPTIMIZERS = "optimizers"
"""A key below ``KEY``: the class of each optimizer by its path (``optimizers.classes_of``)."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class StateSource:
    """The training state of one rank, as the engine sees it.

    All methods are called on the training thread, are not collective, and must not copy tensors or
    synchronise a device.
    """

    clocks: tuple[str, ...] = ()
    """Places in ``collect()``, such as ``trainer.seconds``, that hold a time: a step that is repeated differs there."""
    has_ended = False
    """True if the restored state has nothing left to train, and a line has said so."""

    def collect(self) -> dict[str, Any]:
        """Return the whole current state: nested dicts, lists and tuples of tensors and plain values.

        Called at every boundary. The tensors are the live ones (or detached aliases of them).
        """
        raise NotImplementedError

    def named(self) -> Mapping[str, Any]:
        """Return modules, optimizers and other objects by the path of their state in ``collect()``."""
        raise NotImplementedError

    def expected(self) -> Mapping[str, torch.Tensor]:
        """Return live tensors, by their name in a shard, that a snapshot must hold with equal shape and dtype."""
        raise NotImplementedError

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """Load a state that ``collect`` returned. Its tensors are valid only during the call: copy them.

        ``data=False``: everything except the position of data loaders, into the live tensors, during a training (a
        rollback that skips batches).
        """
        raise NotImplementedError

    def note_boundary(self) -> None:
        """Note where the data stands: a boundary captured nothing, and may turn out to be the last one."""

    def end(self) -> None:
        """Let ``collect`` return data loaders as they were at the last boundary: loops over them may have been left."""

    def release(self) -> None:
        """Let go of all objects: the engine is at its end, and its user may need their memory."""

    def lazy_tensors(self) -> Iterable[torch.Tensor]:
        """Return tensors, beside those of optimizers, that change only behind a gate (weight averages); no buffers."""
        return ()

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules, as they are wrapped."""
        return [value for value in self.named().values() if isinstance(value, torch.nn.Module)]

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the inner torch optimizers by the paths of their states in ``collect()``."""
        named = self.named().items()
        return {name: stepping(value) for name, value in named if isinstance(value, torch.optim.Optimizer)}

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the inner torch optimizers: their steps are gated, their parameters and state are captured lazily."""
        return list(self.named_optimizers().values())

    def optimizer_parameters(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        """Return the parameters of each optimizer in its own order, by the path of its state in ``collect()``."""
        return {name: parameters_of(one) for name, one in self.named_optimizers().items()}

    def resizable_names(self) -> set[str]:
        """Return names of ``expected()`` whose tensors may have another shape in a snapshot: training may change it."""
        names = set[str]()
        for path, value in self.named().items():
            if isinstance(value, torch.nn.Module):
                names.update(f"{path}.{name}" for name in resizable_names(unwrapped(value)))
        return names

    def replicated_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return parameters that are equal on all ranks (DDP). Each rank captures a share of them and of their
        optimizer state. DTensors need not be listed. Returning nothing is always right.
        """
        replicated = [module for module in self.modules() if ddp_of(module) is not None]
        return [one for module in replicated for one in module.parameters() if one.requires_grad]

    def parameter_names(self) -> Mapping[int, str]:
        """Return the name of each live parameter by its ``id``, without the wrappers of DDP and ``torch.compile``."""
        named = [pair for module in self.modules() for pair in unwrapped(module).named_parameters()]
        return {id(tensor): without_compiled(name.removeprefix("module.")) for name, tensor in named}
