"""Where the training state comes from: the one interface between a training loop and the engine."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

KEY = "lazysnap"
"""Where, in a state, the parts stand that a source of this package adds of its own."""
OPTIMIZERS = "optimizers"
"""There: by path of an optimizer its class and its settings (``settings.OptimizerSettings``)."""


@runtime_checkable
class StateSource(Protocol):
    """The training state of one rank, as the engine sees it.

    All methods are called on the training thread, are not collective, and must not copy tensors or
    synchronise a device.
    """

    def collect(self) -> dict[str, Any]:
        """The whole state as it is now: nested dicts, lists and tuples of tensors and plain values.

        Called at every boundary. The tensors are the live ones (or detached aliases of them).
        """
        ...

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The inner torch optimizers: their steps are gated, their parameters and state are captured lazily."""
        ...

    def lazy_tensors(self) -> Iterable[torch.Tensor]:
        """Further tensors that change only behind a gate (weight averages); never buffers."""
        ...

    def frozen_tensors(self) -> Iterable[torch.nn.Parameter]:
        """The live parameters of the model that require no gradient, in a fixed order; never buffers.

        Those that no optimizer holds are stored once, and watched; whatever else may change at any time goes into
        every snapshot. Returning nothing is always right.
        """
        ...

    def replicated_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Parameters that all ranks keep equal (DDP): with several ranks they, and what optimizers hold for them, are
        captured in shares. Sharded parameters (DTensors) say so themselves. Returning nothing is always right.
        """
        ...

    def optimizer_parameters(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        """By the path of each optimizer's state in ``collect()``: its parameters, in the order of its numbers. The
        optimizers in the order of ``optimizers()``.
        """
        ...

    def parameter_names(self) -> Mapping[int, str]:
        """By ``id`` of a live parameter: its name in the model, without the wrappers of DDP and ``torch.compile``."""
        ...

    def expected(self) -> Mapping[str, torch.Tensor]:
        """Live tensors, by their name in a shard, that a snapshot must hold with equal shape and dtype."""
        ...

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """Put back a state that ``collect`` returned. Its tensors are only lent for the call: copy them.

        ``data=False`` (a rollback that skips batches): everything but the position of data loaders, into the tensors
        that are there, in the middle of a training.
        """
        ...
