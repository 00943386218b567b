"""The training state of an accelerator: all that was prepared, registered, or counts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lazysnap.data import Position
from lazysnap.exports.accelerate import FACTS
from lazysnap.state.objects import ObjectState

_EPOCH = re.compile(
    r"((current|completed|finished|trained|num)_)?epochs?(_(completed|done|finished|trained|idx|index))?"
)
"""Names of counters of epochs. Not ``best_epoch``, and not the ``last_epoch`` of a schedule, which counts steps."""
_KINDS = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers", "custom": "_custom_objects"}


class _Counters:
    """The counters that an accelerator keeps itself."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.facts: dict[str, Any] = {}
        """More for a snapshot that becomes a checkpoint: see ``exports.accelerate``."""
        self.names: dict[str, str] = {}
        """Names of snapshots, by the directories of ``save_state(directory)``."""

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "iteration": accelerator.project_configuration.iteration,
            "step": accelerator.step,
            "world_size": accelerator.num_processes,
            "names": self.names,
            **self.facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.project_configuration.iteration = state["iteration"]
        self._accelerator.step = state["step"]
        self.names = dict(state["names"])


def counted_epochs(custom_objects: Sequence[Any]) -> dict[str, int]:
    """Return the integers called ``epoch`` and the like in registered objects, by their places."""
    found: dict[str, int] = {}
    for number, one in enumerate(custom_objects):
        if not isinstance(one, (torch.optim.lr_scheduler.LRScheduler, torch.nn.Module)):
            state = one.state_dict()
            for name, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(name, str) and _EPOCH.fullmatch(name) and type(value) is int:
                    found[f"{number}.{name}"] = value
    return found


class AcceleratorState(ObjectState):
    """The ``StateSource`` over what an accelerator prepared and what was registered with it, in its order.

    ``positions``: those of the prepared loaders.
    """

    def __init__(self, accelerator: Any, positions: Callable[[], Sequence[Position]]) -> None:
        self._accelerator = accelerator
        self._positions = positions
        self.counters = _Counters(accelerator)
        self._first_custom = 0
        """The objects registered before this number are of a training that ended: Accelerate still lists them."""
        self._wrapped: dict[int, Any] = {}
        """Wrappers that Accelerate does not list, by the id of the model that was prepared to one."""
        self.is_uneven = False
        """True if processes did different numbers of steps: then DDP keeps weights equal, but not optimizer state."""
        super().__init__({})

    def note_wrapper(self, model: Any, wrapper: Any) -> None:
        """``model``, which is listed, was prepared to ``wrapper``: DDP, so all ranks hold the same."""
        self._wrapped[id(model)] = wrapper

    def custom_objects(self) -> list[Any]:
        """Return what was registered for the present training."""
        registered: list[Any] = self._accelerator._custom_objects
        return registered[self._first_custom :]

    def forget(self) -> list[Any]:
        """Leave out what is registered by now, and return it: another training begins, with its own objects."""
        left_out = self.custom_objects()
        self._first_custom += len(left_out)
        return left_out

    def refresh(self) -> None:
        """Take in what was prepared and registered since the last call."""
        objects = self._named()
        if [*objects] != [*self._objects] or any(objects[name] is not one for name, one in self._objects.items()):
            super().__init__(objects)

    def _named(self) -> dict[str, Any]:
        accelerator = self._accelerator
        listed = {kind: getattr(accelerator, held) for kind, held in _KINDS.items()} | {"loader": self._positions()}
        listed["custom"] = self.custom_objects()
        listed["model"] = [self._wrapped.get(id(model), model) for model in listed["model"]]
        found = {
            kind if number == 0 else f"{kind}_{number}": one
            for kind, ones in listed.items()
            for number, one in enumerate(ones)
        }
        if accelerator.scaler is not None:
            found["scaler"] = accelerator.scaler
        return {**found, FACTS: self.counters}

    def check_averages_gradients(self) -> None:
        """See ``ObjectState.check_averages_gradients``. Accelerate accumulates within ``no_sync()``, too."""
        if self._accelerator.sync_gradients:
            super().check_averages_gradients()

    def replicated_parameters(self) -> Iterable[torch.nn.Parameter]:
        """See ``StateSource.replicated_parameters``."""
        return () if self.is_uneven else super().replicated_parameters()
