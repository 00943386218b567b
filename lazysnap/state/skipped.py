"""Handles values of unknown types in the state: a snapshot skips them, and a restart keeps those of the program."""

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


class SkippedValues:
    """Collects the paths of the values that a snapshot skips.

    ``plain_below``: top-level keys below which such a value is converted to a plain one if possible (enumerations,
    dataclasses, subclasses of dict and list), for tools that load a checkpoint without the program.
    """

    def __init__(self, plain_below: Collection[str] = ()) -> None:
        self._plain_below = plain_below
        self.kinds: dict[Path, str] = {}
        """The type of each, by path."""
        self._open: set[int] = set()
        """The ids of the containers around the current value."""

    def without(self, value: Any, *path: Any) -> Any:
        """Return ``value`` at ``path`` without values of unknown types.

        A dict lacks such entries; a list or tuple has ``None`` in their places. Containers without such values are
        returned unchanged. ``None``, if the type of ``value`` itself is unknown.
        """
        result = with_stack(self._without, value, path, MAX_STATE_DEPTH)
        if result is _NOTHING:
            return None
        return result

    def _without(self, value: Any, path: Path, levels: int) -> Any:
        if not levels or id(value) in self._open:
            self._skip(path, value)  # nested too deep, or it contains itself
            return _NOTHING
        self._open.add(id(value))
        try:
            return self._known_parts(value, path, levels)
        finally:
            self._open.discard(id(value))

    def _known_parts(self, value: Any, path: Path, levels: int) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict):
            return self._known_entries(value, path, levels)
        if kind in (list, tuple):
            return self._known_items(value, path, levels)
        if is_known(value):
            return value
        skipped = self.kinds.copy()
        result = _NOTHING
        if path and path[0] in self._plain_below:
            form = _plain_form(value)
            if form is not _NOTHING:
                result = self._without(form, path, levels - 1)
        self.kinds = skipped  # the value is skipped as a whole, not by its parts
        self._skip(path, value)
        return result

    def _known_entries(self, value: dict[Any, Any], path: Path, levels: int) -> dict[Any, Any]:
        kept = type(value)()
        for key, item in value.items():
            if is_known(key):
                part = self._without(item, (*path, key), levels - 1)
                if part is not _NOTHING:
                    kept[key] = part
        for key in value:
            if not is_known(key):
                self._skip((*path, repr(key)), key)
        if len(kept) == len(value) and all(kept[key] is item for key, item in value.items()):
            return value
        return kept

    def _known_items(self, value: list[Any] | tuple[Any, ...], path: Path, levels: int) -> list[Any] | tuple[Any, ...]:
        is_changed = False
        parts = []
        for index, item in enumerate(value):
            part = self._without(item, (*path, index), levels - 1)
            if part is not item:
                is_changed = True
            if part is _NOTHING:
                part = None
            parts.append(part)
        if is_changed:
            return type(value)(parts)
        return value

    def _skip(self, path: Path, value: Any) -> None:
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
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return _NOTHING


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
    key = path[0]
    rest = path[1:]
    if isinstance(target, dict):
        current = None
        if rest:
            current = target[key]
        copy = target.copy()
        copy[key] = _put(current, live[key], rest)
        return copy
    if isinstance(target, (list, tuple)):
        parts = list(target)
        parts[key] = _put(parts[key], live[key], rest)
        return type(target)(parts)
    raise TypeError(f"{type(target).__qualname__} has no item {key!r}")
