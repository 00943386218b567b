"""The weights of the model in a snapshot: the choice of tensors, and their names in the model."""

from collections.abc import Iterator, Mapping
from typing import Any

from lazysnap.errors import ConfigError, FormatError
from lazysnap.shard.manifest import EXTRAS, TAG

MODEL = "model"
LIGHTNING_WEIGHTS = "state_dict"

_PAIRS = ("dict", "OrderedDict", "Counter", "defaultdict", "Namespace", "SimpleNamespace")
_LISTS = ("tuple", "set", "frozenset", "deque")


def is_lightning(state: Any) -> bool:
    """True if an encoded (or decoded) state was taken by ``LazySnapshotCallback``."""
    return isinstance(state, Mapping) and {EXTRAS, LIGHTNING_WEIGHTS, "loops"} <= set(state)


def chosen_tensors(state: Any, only: str | None) -> dict[str, str]:
    """Return the name of each chosen tensor in the snapshot, by its name in a file of weights.

    These are the tensors below ``only`` (a path in the state, joined with dots), without that prefix. Default:
    Lightning's ``state_dict``, else the object named ``model``, else all.
    Raises: ConfigError, if there are none below ``only``; FormatError, if two get one name.
    """
    paths = list(_tensors(state, ()))
    prefix = path_of_weights(state, only)
    chosen: dict[str, str] = {}
    for path, name in paths:
        text = ".".join(path)
        if prefix is not None:
            if not text.startswith(f"{prefix}."):
                continue
            text = text[len(prefix) + 1 :]
        if text in chosen or text == "__metadata__":
            raise FormatError(f"two tensors would be called {text!r}; choose fewer with `lazysnap export --only`")
        chosen[text] = name
    if not chosen and prefix is not None:
        tops = sorted({path[0] for path, _ in paths if path})
        raise ConfigError(f"no tensors below {prefix!r}; --only can name one of {tops}, or a path below it")
    if not chosen:
        raise ConfigError("the snapshot holds no tensors")
    return chosen


def path_of_weights(state: Any, only: str | None) -> str | None:
    """Return the path in a state below which weights are chosen; ``None``: everywhere."""
    if only is not None:
        return only
    if is_lightning(state):
        return LIGHTNING_WEIGHTS
    if isinstance(state, dict) and MODEL in state:
        return MODEL
    return None


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and name of every tensor in an encoded state, in its order."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, str(index)))
    elif isinstance(value, dict) and TAG not in value:
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, dict):
        tag = value[TAG]
        inner = value.get("v")
        if tag == "tensor" and isinstance(inner, str):
            yield path, inner
        elif tag in _PAIRS and isinstance(inner, list):
            for pair in inner:
                if isinstance(pair, list) and len(pair) == 2:
                    yield from _tensors(pair[1], (*path, str(pair[0])))
        elif (tag in _LISTS and isinstance(inner, list)) or tag == "registered":
            yield from _tensors(inner, path)
