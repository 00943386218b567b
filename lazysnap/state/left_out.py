"""Values of unknown types in the state: a snapshot leaves them out, and a restart keeps those of the program."""

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lazysnap.shard.limits import MAX_STATE_DEPTH, with_stack
from lazysnap.state.codec import is_known

Path = tuple[Any, ...]
"""Keys and indices from the top of the state to a value."""

_NOTHING = object()


class LeftOut:
    """Collects the paths of the values that a snapshot leaves out.

    ``plain_below``: top-level keys below which such a value becomes a plain one, if it has a plain form (enumerations,
    dataclasses, subclasses of dict and list). Tools that load a checkpoint without the program read these parts.
    """

    def __init__(self, plain_below: Collection[str] = ()) -> None:
        self._plain_below = plain_below
        self.kinds: dict[Path, str] = {}
        """The type of each, by path."""
        self._open: set[int] = set()
        """The ids of the containers around the value that is examined now."""

    def without(self, value: Any, *path: Any) -> Any:
        """Return ``value``, which is at ``path``, without values of types that the encoding does not know.

        A dict lacks such entries; a list or tuple has ``None`` in their places. Containers without such values are
        returned unchanged. ``None``, if the type of ``value`` itself is unknown.
        """
        found = with_stack(lambda: self._without(value, path, MAX_STATE_DEPTH))
        return None if found is _NOTHING else found

    def _without(self, value: Any, path: Path, levels: int) -> Any:
        if not levels or id(value) in self._open:
            self._note(path, value)  # nested too deep, or it contains itself
            return _NOTHING
        self._open.add(id(value))
        try:
            return self._known_parts(value, path, levels)
        finally:
            self._open.discard(id(value))

    def _known_parts(self, value: Any, path: Path, levels: int) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict):
            items = [(key, self._without(one, (*path, key), levels - 1)) for key, one in value.items() if is_known(key)]
            for key in value:
                if not is_known(key):
                    self._note((*path, repr(key)), key)
            is_same = len(items) == len(value) and all(one is value[key] for key, one in items)
            return value if is_same else kind((key, one) for key, one in items if one is not _NOTHING)
        if kind in (list, tuple):
            parts = [self._without(one, (*path, index), levels - 1) for index, one in enumerate(value)]
            if all(one is old for one, old in zip(parts, value, strict=True)):
                return value
            return kind(None if one is _NOTHING else one for one in parts)
        if is_known(value):
            return value
        form = _plain_form(value) if path and path[0] in self._plain_below else _NOTHING
        noted = self.kinds.copy()
        result = _NOTHING if form is _NOTHING else self._without(form, path, levels - 1)
        self.kinds = noted  # the value as a whole stands for its parts
        self._note(path, value)
        return result

    def _note(self, path: Path, value: Any) -> None:
        self.kinds[path] = f"{type(value).__module__}.{type(value).__qualname__}"


def _plain_form(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    plain = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return _NOTHING if plain is None else plain(value)


def with_values_of(
    live: Mapping[str, Any], state: dict[str, Any], paths: Iterable[Collection[Any]]
) -> tuple[dict[str, Any], list[Path]]:
    """Return ``state`` with the values that ``live`` has at ``paths``, and the paths where it has none."""
    missing = []
    for path in map(tuple, paths):
        try:
            state = _put(state, live, path)
        except (LookupError, TypeError):
            missing.append(path)
    return state, missing


def _put(target: Any, live: Any, path: Path) -> Any:
    """Return a copy of ``target`` that has the value of ``live`` at ``path``."""
    if not path:
        return live
    key, rest = path[0], path[1:]
    if isinstance(target, dict):
        copy = target.copy()
        copy[key] = _put(target[key] if rest else None, live[key], rest)
        return copy
    if isinstance(target, (list, tuple)):
        parts = list(target)
        parts[key] = _put(parts[key], live[key], rest)
        return type(target)(parts)
    raise TypeError(f"{type(target).__qualname__} has no item {key!r}")
