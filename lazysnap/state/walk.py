"""Walks the training state: its tensors in a fixed order, and everything else in the safe encoding.

``StateWalker`` repeats the walk at every boundary. Dicts that hold only tensors (parameters), or only such dicts (the
optimizer's state of all parameters), keep their text as long as they have the same keys.
"""

import contextlib
import gc
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch

from lazysnap.errors import StateError
from lazysnap.shard.limits import with_stack
from lazysnap.state.codec import Encoder

_Path = tuple[Any, ...]
_TENSOR_TYPES = {torch.Tensor, torch.nn.Parameter}


@dataclass(frozen=True)
class Walk:
    """The tensors of a state: ``tensors[i]`` is at ``paths[i]`` in it, and is called ``names[i]`` in the text."""

    tensors: list[torch.Tensor]
    paths: list[_Path]
    names: list[str]
    skeleton: Any
    """The encoded state when ``paths`` and ``names`` were made."""
    text: str
    """The encoded state as JSON."""
    parts: "dict[_Path, _TensorDict]" = field(default_factory=dict, repr=False)
    """The dicts of tensors by their paths."""


@dataclass(frozen=True)
class _TensorDict:
    """A dict that holds only tensors, or only such dicts."""

    kind: type
    keys: tuple[Any, ...]
    inner_keys: list[tuple[Any, ...]] | None
    """The keys of each dict in it; ``None``: it holds tensors."""
    first: int
    """The number of its first tensor."""
    text: msgspec.Raw


class _Changed(Exception):
    """The structure differs from the known one."""


def walk(state: Any) -> Walk:
    """Walk ``state``, without copying anything.

    Raises: StateError, naming the path of a value that the safe encoding does not know.
    """
    try:
        return with_stack(_full_walk, state)
    except RecursionError as error:
        raise StateError(
            "the state needs more than Python's stack: an encode function that was given to "
            "lazysnap.register_type never returns"
        ) from error


def _full_walk(state: Any) -> Walk:
    return _FullWalk().of(state)  # a new one each time: ``with_stack`` may run this twice


class StateWalker:
    """Walks the same state at every boundary. Not thread-safe."""

    def __init__(self) -> None:
        self._last_walk: Walk | None = None
        """The last full walk. ``None``: the next one is full."""

    def walk(self, state: dict[str, Any]) -> Walk:
        """Like ``walk``. While the structure is the same, ``names`` and ``paths`` are the same objects as before.

        Raises: StateError, naming the path of a value that the safe encoding does not know.
        """
        if self._last_walk is not None:
            try:
                return _WalkAgain(self._last_walk).of(state)
            except (_Changed, StateError, UnicodeEncodeError, RecursionError):  # the full walk names what differs
                self._last_walk = None
        self._last_walk = walk(state)
        return self._last_walk


class _FullWalk(Encoder):
    """Names every tensor, and records the text of dicts of tensors."""

    def __init__(self) -> None:
        super().__init__(self._name)
        self.tensors: list[torch.Tensor] = []
        self.paths: list[_Path] = []
        self.names: dict[str, None] = {}
        self.parts: dict[_Path, _TensorDict] = {}
        for kind in (dict, OrderedDict):
            self.table[kind] = partial(self._note_tensor_dict, self.table[kind])

    def of(self, state: Any) -> Walk:
        """Return the walk over ``state``. Raises: as ``encode``."""
        skeleton = self.any(state)
        return Walk(self.tensors, self.paths, list(self.names), skeleton, _dump(skeleton), self.parts)

    def _name(self, tensor: torch.Tensor, path: _Path) -> str:
        name = _unique(path, self.names)
        self.tensors.append(tensor)
        self.paths.append(path)
        self.names[name] = None
        return name

    def _note_tensor_dict(self, encode: Callable[[Any], Any], value: Any) -> Any:
        """Encode a dict; record its text in ``parts`` if it holds only tensors, or only such dicts."""
        first = len(self.tensors)
        encoded = encode(value)
        children: Collection[Any] = value.values()
        inner_keys = None
        if not _are_tensors(children):
            if not _are_tensor_dicts(children):
                return encoded
            inner_keys = list(map(tuple, children))
        text = msgspec.Raw(_dump(encoded).encode("utf-8", "surrogatepass"))
        self.parts[tuple(self.path)] = _TensorDict(type(value), tuple(value), inner_keys, first, text)
        return encoded


class _WalkAgain(Encoder):
    """Walks a state again. Raises: _Changed, if it has another structure than at the last walk."""

    def __init__(self, last_walk: Walk) -> None:
        super().__init__(self._name)
        self._last_walk = last_walk
        self._tensors: list[torch.Tensor] = []
        for kind in (dict, OrderedDict):
            self.table[kind] = partial(self._repeat_text, self.table[kind])

    def of(self, state: Any) -> Walk:
        """Return the walk over ``state``. Raises: also as ``encode``."""
        last = self._last_walk
        encoded = self.any(state)
        if len(self._tensors) != len(last.names):
            raise _Changed
        text = msgspec.json.encode(encoded).decode()
        return Walk(self._tensors, last.paths, last.names, last.skeleton, text)

    def _name(self, tensor: torch.Tensor, path: _Path) -> str:
        number = len(self._tensors)
        if number == len(self._last_walk.paths) or path != self._last_walk.paths[number]:
            raise _Changed
        self._tensors.append(tensor)
        return self._last_walk.names[number]

    def _repeat_text(self, encode: Callable[[Any], Any], value: Any) -> Any:
        """Return the text of a dict of tensors as at the last walk, or encode any other dict."""
        part = self._last_walk.parts.get(tuple(self.path))
        if part is None:
            return encode(value)
        if (part.kind, part.keys, part.first) != (type(value), tuple(value), len(self._tensors)):
            raise _Changed
        children: Collection[Any] = value.values()
        if part.inner_keys is not None:
            if set(map(type, children)) != {dict} or list(map(tuple, children)) != part.inner_keys:
                raise _Changed
            children = list(chain.from_iterable(map(dict.values, children)))
        if not _are_tensors(children):
            raise _Changed
        self._tensors.extend(children)
        return part.text


def _are_tensors(values: Collection[Any]) -> bool:
    """True if all values are tensors, and there is at least one."""
    return bool(values) and set(map(type, values)) <= _TENSOR_TYPES


def _are_tensor_dicts(values: Collection[Any]) -> bool:
    """True if all values are dicts that hold only tensors, and there is at least one."""
    return bool(values) and all(type(value) is dict and _are_tensors(value.values()) for value in values)


def _dump(encoded: Any) -> str:
    try:
        return msgspec.json.encode(encoded).decode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in names of files
        return json.dumps(encoded, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _unique(path: Collection[Any], taken: Container[str]) -> str:
    """Return a name such as ``state_dict.net.weight``. Paths with the same text (``1``, ``"1"``) get numbers."""
    base = ".".join(map(str, path)) or "value"
    name = base
    number = 2
    while name in taken or name == "__metadata__":
        name = f"{base}#{number}"
        number += 1
    return name


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable garbage collection within the context. A program that disabled it itself is not affected.

    A walk makes some ten thousand short-lived containers. Their number would trigger full collections, of 160 ms each
    with torch imported, while a boundary takes 4 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
