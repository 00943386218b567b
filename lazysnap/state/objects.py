"""The training state of a plain loop: named objects with ``state_dict`` and ``load_state_dict``."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lazysnap.data.resumable import ResumableLoader
from lazysnap.data.streams import collect_rng, restore_rng
from lazysnap.errors import ConfigError, StateError
from lazysnap.shard.manifest import EXTRAS, PRETRAINED
from lazysnap.state.metrics import METRICS, check_metrics, collect_metrics, restore_metrics
from lazysnap.state.modules import check_loads, load_module, reordered_tensors, warn_of_reordered
from lazysnap.state.optimizers import check_memory_orders, check_optimizers, classes_of, put_back
from lazysnap.state.plain_dicts import check_dict, restore_dict
from lazysnap.state.pretrained import pretrained
from lazysnap.state.scalars import plain_numbers, state_of_scaler
from lazysnap.state.source import OPTIMIZERS, StateSource
from lazysnap.state.unsupported import check_averages_gradients, check_supported
from lazysnap.state.wrappers import ddp_of, stepping, unwrapped

RNG = "rng"


def _state_of(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, torch.optim.Optimizer):
        return stepping(value).state_dict()
    if isinstance(value, torch.amp.GradScaler):
        return state_of_scaler(value)
    return unwrapped(value).state_dict()


def is_data_position(value: object) -> bool:
    """True if the state of an object is a position in the data."""
    return getattr(value, "is_data_position", False) is True


class ObjectState(StateSource):
    """A ``StateSource`` over ``{"model": model, "optimizer": optimizer, "scheduler": …}``.

    Values have ``state_dict()`` and ``load_state_dict()`` (modules, optimizers, schedulers, samplers, GradScaler,
    ``ResumableLoader``), or are dicts, updated in place on a restore, with the tensors in them. Generators of random
    numbers are always included.
    Raises: ConfigError, for a value that is neither, for a data loader itself, for a ``ResumableLoader`` over an
    iterator, or for the names ``rng`` and ``lazysnap``.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            if name in (RNG, EXTRAS):
                raise ConfigError(
                    f"the name {name!r} is taken: generators are captured as 'rng', classes of optimizers as 'lazysnap'"
                )
            if isinstance(value, torch.utils.data.DataLoader):
                raise ConfigError(
                    f"state[{name!r}] is a {type(value).__qualname__}: give lazysnap.ResumableLoader(loader) to the "
                    "state, and iterate that"
                )
            if isinstance(value, ResumableLoader) and isinstance(value.loader, Iterator):
                raise ConfigError(
                    f"state[{name!r}]: ResumableLoader needs a data loader that starts again at every iter(), got "
                    f"{type(value.loader).__qualname__}"
                )
            stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            if not stateful and not isinstance(value, dict):
                raise ConfigError(
                    f"state[{name!r}] must be a dict or have state_dict() and load_state_dict(), got "
                    f"{type(value).__qualname__}"
                )
        self._objects = dict(objects)
        self._support_checked = False
        self._loads_checked = False
        self._pretrained: str | None = None
        """The files that models of Transformers and PEFT save with their weights, after the first collection."""

    def named(self) -> Mapping[str, Any]:
        """See ``StateSource.named``."""
        return self._objects

    def release(self) -> None:
        """See ``StateSource.release``."""
        self._objects.clear()

    def note_boundary(self) -> None:
        """See ``StateSource.note_boundary``."""
        for value in self._objects.values():
            if isinstance(value, ResumableLoader):
                value.position.note_boundary()

    def end(self) -> None:
        """See ``StateSource.end``."""
        for value in self._objects.values():
            if isinstance(value, ResumableLoader):
                value.position.end()

    def _check_supported(self) -> None:
        check_supported(self._objects)
        self._support_checked = True

    def _check_loads(self, state: Mapping[str, Any]) -> None:
        for name, module in self._unwrapped_modules().items():
            check_loads(name, module, state[name])
        self._loads_checked = True

    def collect(self) -> dict[str, Any]:
        """See ``StateSource.collect``.

        Raises: StateError, at the first call, for objects that FSDP 1, DeepSpeed or similar packages shard; for local
        SGD; for a model that no restart could load.
        """
        if not self._support_checked:
            self._check_supported()
        self.check_averages_gradients()
        state = {name: _state_of(value) for name, value in self._objects.items()}
        if not self._loads_checked:
            self._check_loads(state)
            self._pretrained = pretrained(self._unwrapped_modules())
        # state_dict() of a module is an OrderedDict with an attribute; a plain dict is what a restore returns.
        for name, value in state.items():
            if isinstance(value, dict):
                state[name] = dict(value)
        state[RNG] = collect_rng()
        state[EXTRAS] = {OPTIMIZERS: classes_of(self)}
        if self._pretrained is not None:
            state[EXTRAS][PRETRAINED] = self._pretrained
        metrics = collect_metrics(self._unwrapped_modules())
        if metrics:
            state[EXTRAS][METRICS] = metrics
        return state

    def _unwrapped_modules(self) -> dict[str, torch.nn.Module]:
        modules = {}
        for name, value in self._objects.items():
            if isinstance(value, torch.nn.Module):
                modules[name] = unwrapped(value)
        return modules

    def check_averages_gradients(self) -> None:
        """Check that optimizer steps are not taken within ``no_sync()``. Raises: StateError."""
        for name, value in self._objects.items():
            module = ddp_of(value)
            if module is not None:
                check_averages_gradients(name, module)

    def expected(self) -> Mapping[str, torch.Tensor]:
        """See ``StateSource.expected``. All tensors of the modules. Raises: as ``collect``."""
        self._check_supported()  # before the state_dict() of such a module, which may be collective
        tensors = {}
        for name, module in self._unwrapped_modules().items():
            for key, tensor in module.state_dict().items():
                if isinstance(tensor, torch.Tensor):
                    tensors[f"{name}.{key}"] = tensor
        return tensors

    def _check_loaders(self) -> None:
        """Check that no loader is being iterated: that iterator would continue with other data.

        Raises: StateError.
        """
        for name, value in self._objects.items():
            if isinstance(value, ResumableLoader) and value.position.is_iterated:
                raise StateError(
                    f"{name}: an iterator over this loader exists already, and would not continue at the snapshot; "
                    "restore before iter(loader) or the loop over it, or delete that iterator first. Nothing was loaded"
                )

    def _check_memory_orders(self, state: Mapping[str, Any]) -> None:
        """Warn about live tensors in another memory order. Raises: see ``check_memory_orders``."""
        reordered: dict[str, torch.Tensor] = {}
        for name, module in self._unwrapped_modules().items():
            for key, tensor in reordered_tensors(module, state[name]).items():
                reordered[f"{name}.{key}"] = tensor
        for name, value in self._objects.items():
            if isinstance(value, torch.optim.Optimizer):
                check_memory_orders(name, stepping(value), reordered)
        warn_of_reordered(reordered)

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """See ``StateSource.load``. Positions in the data have ``is_data_position = True``.

        Raises: StateError, before anything is loaded, if the snapshot lacks a named object, or has an optimizer of
        another class or with other parameter groups.
        """
        missing = [name for name in self._objects if name not in state]
        if missing:
            raise StateError(
                f"the snapshot has no {', '.join(missing)}; it holds {sorted(set(state) - {RNG, EXTRAS})}: "
                "name the objects as when it was taken, or give another training a directory of its own"
            )
        if data:
            self._check_loaders()
        check_optimizers(self, state, None)
        metrics = state[EXTRAS].get(METRICS, {})
        check_metrics(self._unwrapped_modules(), metrics)
        for name, value in self._objects.items():
            if isinstance(value, dict):
                check_dict(name, value, state[name])
        self._check_memory_orders(state)
        for name, value in self._objects.items():
            if not data and is_data_position(value):
                continue
            if isinstance(value, dict):
                restore_dict(value, state[name])
            elif isinstance(value, torch.nn.Module):
                load_module(unwrapped(value), state[name])
            elif isinstance(value, torch.optim.Optimizer):
                put_back(stepping(value), state[name])
            elif isinstance(value, torch.amp.GradScaler):
                value.load_state_dict(plain_numbers(state[name]))
            else:
                value.load_state_dict(state[name])
        restore_metrics(self._unwrapped_modules(), metrics)
        restore_rng(state[RNG])
