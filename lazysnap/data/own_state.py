"""Data loaders and datasets that save their own position.

torchdata's ``StatefulDataLoader`` does, too, but its iterators read as those of torch do, so its own state is not used.
Programs use it beside lazysnap: their checkpoints contain it.
"""

from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

from torch.utils.data import DataLoader

from lazysnap.data.parts import attributes_of

_BY_NAME = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def is_stateful(value: Any) -> bool:
    """True if ``value`` saves and loads its own state."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def saves_position(data: Any) -> bool:
    """True if ``data``, an iterable dataset or a loader, saves its position: ``state_dict`` needs no argument."""
    if not is_stateful(data):
        return False
    parameters = signature(data.state_dict).parameters.values()
    return not any(item.default is item.empty and item.kind in _BY_NAME for item in parameters)


def is_of_torchdata(base: Any) -> bool:
    """True for torchdata's ``StatefulDataLoader``, without importing torchdata."""
    return isinstance(base, DataLoader) and any(kind.__name__ == "StatefulDataLoader" for kind in type(base).__mro__)


def is_asked(base: Any) -> bool:
    """True if the loader's own state is used; otherwise indices are skipped, or the dataset's state is used."""
    return saves_position(base) and not is_of_torchdata(base)


def keeps_loaded_state(dataset: Any) -> bool:
    """True if each later iteration begins at the loaded state again, as in a stream of Hugging Face's ``datasets``."""
    return "_starting_state_dict" in attributes_of(dataset)


def forget_loaded_state(dataset: Any) -> None:
    """Let the next iteration begin at the start of the data, once the current one has begun."""
    if keeps_loaded_state(dataset):
        dataset.load_state_dict(None)


def rest_of(loader: Any, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return the iterator over the rest of the loaded epoch, without beginning the next one."""
    if "restart_on_stop_iteration" not in attributes_of(loader):
        return make()
    restarts = loader.restart_on_stop_iteration  # nodes of torchdata
    loader.restart_on_stop_iteration = False
    try:
        return make()
    finally:
        loader.restart_on_stop_iteration = restarts


def has_early_iterator(loader: Any) -> bool:
    """True if a ``StatefulDataLoader`` has made the iterator of the next epoch, and drawn its seed.

    It does so when it is asked for its state: Accelerate asks when it prepares a loader. The first epoch then draws
    nothing.
    """
    return bool(attributes_of(loader).get("_initial_iter_for_state_dict"))


def drop_early_iterator(loader: Any) -> bool:
    """Let a ``StatefulDataLoader`` make its iterator in the next epoch. Return ``has_early_iterator`` before that."""
    if "_initial_iter_for_state_dict" not in attributes_of(loader):
        return False
    was_early = has_early_iterator(loader)
    loader._iterator = None
    loader._initial_iter_for_state_dict = False
    return was_early
