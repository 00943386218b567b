"""The training state of an accelerator: prepared and registered objects, and counters."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lazysnap.errors import StateError
from lazysnap.exports.accelerate import FACTS, numbered
from lazysnap.integrations.accelerate.boundaries import BoundaryWatch
from lazysnap.state.objects import ObjectState
from lazysnap.state.wrappers import wrapper_prefix

_EPOCH = re.compile(
    r"((current|completed|finished|trained|num)_)?epochs?(_(completed|done|finished|trained|idx|index))?"
)
"""Names of counters of epochs. Not ``best_epoch``, nor ``last_epoch`` of a schedule, which counts steps."""


class _Counters:
    """The counters that an accelerator keeps itself."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.facts: dict[str, Any] = {}
        """Further values of a snapshot that becomes a checkpoint: see ``exports.accelerate``."""
        self.names: dict[str, str] = {}
        """Names of snapshots, by the directories of ``save_state(directory)``."""

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "iteration": accelerator.project_configuration.iteration,
            "step": accelerator.step,
            "names": self.names,
            **self.facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.project_configuration.iteration = state["iteration"]
        self._accelerator.step = state["step"]
        self.names = dict(state["names"])


def counted_epochs(custom_objects: Sequence[Any]) -> dict[str, int]:
    """Return the integers with names such as ``epoch`` in registered objects, by place."""
    epochs: dict[str, int] = {}
    for number, custom_object in enumerate(custom_objects):
        if isinstance(custom_object, (torch.optim.lr_scheduler.LRScheduler, torch.nn.Module)):
            continue
        state = custom_object.state_dict()
        if not isinstance(state, Mapping):
            continue
        for name, value in state.items():
            if isinstance(name, str) and _EPOCH.fullmatch(name) and type(value) is int:
                epochs[f"{number}.{name}"] = value
    return epochs


class AcceleratorState(ObjectState):
    """The ``StateSource`` over the prepared and registered objects of an accelerator, in its order."""

    def __init__(self, accelerator: Any, boundaries: BoundaryWatch) -> None:
        """``boundaries``: has the positions of the prepared loaders."""
        self._accelerator = accelerator
        self._boundaries = boundaries
        self.counters = _Counters(accelerator)
        self._first_custom = 0
        """Objects registered before this index belong to an earlier training, but Accelerate still lists them."""
        self._wrapped: dict[int, Any] = {}
        """Wrappers that Accelerate does not list, by the id of the wrapped model."""
        self.is_uneven = False
        """True if processes did different numbers of steps. DDP then keeps weights equal, but not optimizer state."""
        super().__init__({})

    def add_wrapper(self, model: Any, wrapper: Any) -> None:
        """Use ``wrapper`` for ``model``, which is listed: the wrapper is DDP, so all ranks hold the same."""
        self._wrapped[id(model)] = wrapper

    def custom_objects(self) -> list[Any]:
        """Return the registered objects of the current training."""
        registered: list[Any] = self._accelerator._custom_objects
        return registered[self._first_custom :]

    def forget(self) -> list[Any]:
        """Return the registered objects, and skip them from now on, because another training begins."""
        skipped = self.custom_objects()
        self._first_custom += len(skipped)
        return skipped

    def refresh(self) -> None:
        """Add the objects that were prepared and registered since the last call."""
        objects = self._named()
        is_unchanged = list(objects) == list(self._objects)
        if is_unchanged:
            is_unchanged = all(objects[name] is earlier for name, earlier in self._objects.items())
        if not is_unchanged:
            super().__init__(objects)

    def _named(self) -> dict[str, Any]:
        accelerator = self._accelerator
        objects: dict[str, Any] = {}

        def add(kind: str, listed: Sequence[Any]) -> None:
            for number, item in enumerate(listed):
                objects[numbered(kind, number)] = item

        add("model", [self._wrapped.get(id(model), model) for model in accelerator._models])
        add("optimizer", accelerator._optimizers)
        add("scheduler", accelerator._schedulers)
        add("custom", self.custom_objects())
        add("loader", self._boundaries.positions)
        if accelerator.scaler is not None:
            objects["scaler"] = accelerator.scaler
        objects[FACTS] = self.counters
        return objects

    def collect(self) -> dict[str, Any]:
        """See ``StateSource.collect``. Raises: StateError, also if the accelerator does not exist any more."""
        try:
            return super().collect()
        except ReferenceError as error:
            raise StateError(
                "the accelerator does not exist any more; call accelerator.end_training() before the function that "
                "made it returns"
            ) from error

    @contextlib.contextmanager
    def as_checkpoint(self, directory: str, *, safe_serialization: bool) -> Iterator[None]:
        """Add the further values of a checkpoint to captures within the context: see ``exports.accelerate``.

        Runs the script's save hooks, which write into ``directory``.
        """
        self.counters.facts = self._checkpoint_facts(directory, safe_serialization=safe_serialization)
        try:
            yield
        finally:
            self.counters.facts = {}

    def _checkpoint_facts(self, directory: str, *, safe_serialization: bool) -> dict[str, Any]:
        accelerator = self._accelerator
        models = accelerator._models
        prefixes = {}
        for number, model in enumerate(models):
            prefixes[numbered("model", number)] = wrapper_prefix(model)
        stateful_loaders = {}
        for number, loader in enumerate(accelerator._dataloaders):
            if getattr(loader, "use_stateful_dataloader", False):
                stateful_loaders[numbered("loader", number)] = loader.state_dict()
        facts: dict[str, Any] = {
            "prefixes": prefixes,
            "safe_serialization": safe_serialization,
            "stateful_loaders": stateful_loaders,
        }
        if accelerator._save_model_state_pre_hook:
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
            all_weights = list(weights)
            for hook in accelerator._save_model_state_pre_hook.values():
                hook(models, weights, directory)
            # A hook removes the weights that it saved itself.
            remaining = {id(model_weights) for model_weights in weights}
            facts["models"] = []
            for number, model_weights in enumerate(all_weights):
                if id(model_weights) in remaining:
                    facts["models"].append(numbered("model", number))
        return facts

    def run_load_hooks(self, directory: str) -> None:
        """Run the script's load hooks, as Accelerate does: they read the files of the save hooks."""
        models = list(self._accelerator._models)
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, directory)

    def check_averages_gradients(self) -> None:
        """See ``ObjectState.check_averages_gradients``. Accelerate accumulates within ``no_sync()``, too."""
        if self._accelerator.sync_gradients:
            super().check_averages_gradients()

    def replicated_parameters(self) -> Iterable[torch.nn.Parameter]:
        """See ``StateSource.replicated_parameters``."""
        if self.is_uneven:
            return ()
        return super().replicated_parameters()
