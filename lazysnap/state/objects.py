"""The training state of a plain loop: named objects with ``state_dict`` and ``load_state_dict``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lazysnap.errors import ConfigError, StateMismatch
from lazysnap.state.rng import collect_rng, restore_rng

_RNG = "rng"


class ObjectState:
    """A ``StateSource`` over ``{"model": model, "optimizer": optimizer, "scheduler": …}``.

    Values have ``state_dict()`` and ``load_state_dict()`` (modules, optimizers, schedulers, samplers, GradScaler), or
    are dicts of plain values, updated in place on a restore. Generators of random numbers are always included.
    Raises: ConfigError, for a value that is neither, or for the name ``rng``.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            if name == _RNG:
                raise ConfigError("the name 'rng' is taken: the state of all generators is always captured under it")
            stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            if not stateful and not isinstance(value, dict):
                raise ConfigError(
                    f"state[{name!r}] must be a dict or have state_dict() and load_state_dict(), got "
                    f"{type(value).__qualname__}"
                )
        self._objects = dict(objects)

    def collect(self) -> dict[str, Any]:
        """See ``StateSource.collect``."""
        state = {
            name: dict(value) if isinstance(value, dict) else value.state_dict()
            for name, value in self._objects.items()
        }
        # state_dict() of a module is an OrderedDict with an attribute; a plain dict is what gets restored.
        state = {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}
        state[_RNG] = collect_rng()
        return state

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """See ``StateSource.optimizers``."""
        return [value for value in self._objects.values() if isinstance(value, torch.optim.Optimizer)]

    def lazy_tensors(self) -> Iterable[torch.Tensor]:
        """See ``StateSource.lazy_tensors``: none, whatever no optimizer holds is copied at the boundary."""
        return ()

    def frozen_tensors(self) -> Iterable[torch.nn.Parameter]:
        """See ``StateSource.frozen_tensors``: of all modules."""
        for value in self._objects.values():
            if isinstance(value, torch.nn.Module):
                yield from (parameter for parameter in value.parameters() if not parameter.requires_grad)

    def expected(self) -> Mapping[str, torch.Tensor]:
        """See ``StateSource.expected``: all tensors of the modules."""
        return {
            f"{name}.{key}": tensor
            for name, value in self._objects.items()
            if isinstance(value, torch.nn.Module)
            for key, tensor in value.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def load(self, state: dict[str, Any]) -> None:
        """See ``StateSource.load``. Raises: StateMismatch, if a named object is not in the snapshot."""
        missing = [name for name in self._objects if name not in state]
        if missing:
            raise StateMismatch(
                f"the snapshot has no {', '.join(missing)}; it holds {sorted(set(state) - {_RNG})}: "
                "name the objects as when it was taken"
            )
        for name, value in self._objects.items():
            if isinstance(value, dict):
                value.clear()
                value.update(state[name])
            else:
                value.load_state_dict(state[name])
        restore_rng(state[_RNG])
