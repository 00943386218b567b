"""The interface between a training loop and the engine: collects and loads the training state."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lazysnap.state.modules import resizable_names
from lazysnap.state.wrappers import ddp_of, stepping, unwrapped, without_compiled

OPTIMIZERS = "optimizers"
"""A key below ``EXTRAS``: the class of each optimizer by its path (``optimizers.classes_of``)."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer in the order in which its state numbers them."""
    parameters: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


class StateSource:
    """The training state of one rank, as the engine sees it.

    All methods are called on the training thread, and must not copy tensors or synchronise a device. Several ranks call
    ``collect`` at the same steps, because a ``state_dict`` of the program may need all of them.
    """

    clocks: tuple[str, ...] = ()
    """Places in ``collect()`` with times, such as ``trainer.seconds``: a repeated step differs in them."""

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
        """Load a state that ``collect`` returned. The live objects may keep its tensors, which nothing else uses.

        ``data=False``: everything except the position of data loaders, into the live tensors, during a training (a
        rollback that skips batches).
        """
        raise NotImplementedError

    def note_boundary(self) -> None:
        """Record the position in the data at a boundary that captured nothing, and may be the last one."""

    def end(self) -> None:
        """Let ``collect`` return data loaders as at the last boundary: loops over them may have ended early."""

    def release(self) -> None:
        """Drop all objects: the engine has ended, and its user may need their memory."""

    def is_finished(self) -> bool:
        """Return True if it is known that the restored training has nothing left to train."""
        return False

    def lazy_tensors(self) -> Iterable[torch.Tensor]:
        """Return further tensors that change only after a gate (weight averages), besides those of optimizers; no
        buffers.
        """
        return ()

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules, with their wrappers."""
        return [value for value in self.named().values() if isinstance(value, torch.nn.Module)]

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the inner torch optimizers by the paths of their states in ``collect()``."""
        optimizers = {}
        for name, value in self.named().items():
            if isinstance(value, torch.optim.Optimizer):
                optimizers[name] = stepping(value)
        return optimizers

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the inner torch optimizers: their steps are gated, their parameters and state are captured lazily."""
        return list(self.named_optimizers().values())

    def optimizer_parameters(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        """Return the parameters of each optimizer in its own order, by the path of its state in ``collect()``."""
        return {name: parameters_of(optimizer) for name, optimizer in self.named_optimizers().items()}

    def resizable_names(self) -> set[str]:
        """Return names of ``expected()`` whose tensors may have another shape in a snapshot: training may change it."""
        names = set[str]()
        for path, value in self.named().items():
            if isinstance(value, torch.nn.Module):
                for name in resizable_names(unwrapped(value)):
                    names.add(f"{path}.{name}")
        return names

    def replicated_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return parameters that are equal on all ranks (DDP). Each rank captures a share of them and of their
        optimizer state. DTensors need not be listed. Returning nothing is always correct.
        """
        replicated = []
        for module in self.modules():
            if ddp_of(module) is None:
                continue
            for parameter in module.parameters():
                if parameter.requires_grad:
                    replicated.append(parameter)
        return replicated

    def parameter_names(self) -> Mapping[int, str]:
        """Return the name of each live parameter by its ``id``, without the wrappers of DDP and ``torch.compile``.

        A parameter that ``torch.nn.utils.prune`` renamed has its name from before: a restart may begin without masks.
        """
        names = {}
        for module in self.modules():
            inner = unwrapped(module)
            buffers = {name for name, _ in inner.named_buffers(remove_duplicate=False)}
            for name, parameter in inner.named_parameters():
                base, _, suffix = name.rpartition("_")
                if suffix == "orig" and f"{base}_mask" in buffers:
                    name = base
                names[id(parameter)] = without_compiled(name.removeprefix("module."))
        return names
