"""The interface between a training loop and the engine: what the training state is, and how it is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

KEY = "lazysnap"
"""The key in a state that holds what lazysnap adds to it."""
OPTIMIZERS = "optimizers"
"""A key below ``KEY``: the class of each optimizer by its path (``optimizers.classes_of``)."""


@runtime_checkable
class StateSource(Protocol):
    """The training state of one rank, as the engine sees it.

    All methods are called on the training thread, are not collective, and must not copy tensors or
    synchronise a device.
    """

    def collect(self) -> dict[str, Any]:
        """Return the whole current state: nested dicts, lists and tuples of tensors and plain values.

        Called at every boundary. The tensors are the live ones (or detached aliases of them).
        """
        ...

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the inner torch optimizers: their steps are gated, their parameters and state are captured lazily."""
        ...

    def lazy_tensors(self) -> Iterable[torch.Tensor]:
        """Return further tensors that change only behind a gate (weight averages); never buffers."""
        ...

    def frozen_tensors(self) -> Iterable[torch.nn.Parameter]:
        """Return the live parameters of the model that require no gradient, in a fixed order; never buffers.

        Those that no optimizer holds are stored once, and checked for changes. Returning nothing is always right.
        """
        ...

    def replicated_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return parameters that are equal on all ranks (DDP). Each rank captures a share of them and of their
        optimizer state. DTensors need not be listed. Returning nothing is always right.
        """
        ...

    def optimizer_parameters(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        """Return the parameters of each optimizer in its own order, by the path of its state in ``collect()``.

        The optimizers are in the order of ``optimizers()``.
        """
        ...

    def parameter_names(self) -> Mapping[int, str]:
        """Return the name of each live parameter by its ``id``, without the wrappers of DDP and ``torch.compile``."""
        ...

    def expected(self) -> Mapping[str, torch.Tensor]:
        """Return live tensors, by their name in a shard, that a snapshot must hold with equal shape and dtype."""
        ...

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """Load a state that ``collect`` returned. Its tensors are valid only during the call: copy them.

        ``data=False``: everything except the position of data loaders, into the live tensors, during a training (a
        rollback that skips batches).
        """
        ...
