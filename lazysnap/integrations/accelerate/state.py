"""The training state of an accelerator: all that was prepared, registered, or counts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lazysnap.data import Position
from lazysnap.export.accelerate import FACTS
from lazysnap.state.objects import ObjectState

_KINDS = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers", "custom": "_custom_objects"}


class _Counters:
    """What an accelerator counts itself."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.facts: dict[str, Any] = {}
        """More for a snapshot that becomes a checkpoint: see ``export.accelerate``."""

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        iteration, world_size = accelerator.project_configuration.iteration, accelerator.num_processes
        return {"iteration": iteration, "step": accelerator.step, "world_size": world_size, **self.facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.project_configuration.iteration = state["iteration"]
        self._accelerator.step = state["step"]


class AcceleratorState(ObjectState):
    """The ``StateSource`` over what an accelerator prepared and what was registered with it, in its order.

    ``positions``: those of the prepared loaders.
    """

    def __init__(self, accelerator: Any, positions: Callable[[], Sequence[Position]]) -> None:
        self._accelerator = accelerator
        self._positions = positions
        self.counters = _Counters(accelerator)
        self._wrapped: dict[int, Any] = {}
        """By id of a model: what it was prepared to, where that is a wrapper that Accelerate does not list."""
        self.is_uneven = False
        """Whether processes did different numbers of steps: then DDP keeps weights equal, but not optimizer state."""
        super().__init__({})

    def note_wrapper(self, model: Any, wrapper: Any) -> None:
        """``model``, which is listed, was prepared to ``wrapper``: DDP, which tells that all ranks hold the same."""
        self._wrapped[id(model)] = wrapper

    def refresh(self) -> None:
        """Take in what was prepared and registered since the last call."""
        objects = self._named()
        if [*objects] != [*self._objects] or any(objects[name] is not one for name, one in self._objects.items()):
            super().__init__(objects)

    def _named(self) -> dict[str, Any]:
        accelerator = self._accelerator
        listed = {kind: getattr(accelerator, held) for kind, held in _KINDS.items()} | {"loader": self._positions()}
        listed["model"] = [self._wrapped.get(id(model), model) for model in listed["model"]]
        found = {
            kind if number == 0 else f"{kind}_{number}": one
            for kind, ones in listed.items()
            for number, one in enumerate(ones)
        }
        if accelerator.scaler is not None:
            found["scaler"] = accelerator.scaler
        return {**found, FACTS: self.counters}

    def parts_with_weights(self) -> list[str]:
        """Names of the models, the optimizers and the counters: what a checkpoint needs of a snapshot, where all else
        is written by Accelerate.
        """
        return [name for name in self._objects if name.partition("_")[0] in ("model", "optimizer", FACTS)]

    def replicated_parameters(self) -> Iterable[torch.nn.Parameter]:
        """See ``StateSource.replicated_parameters``."""
        return () if self.is_uneven else super().replicated_parameters()
