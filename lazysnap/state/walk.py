"""The walk over the training state: its tensors in a fixed order, and everything else in the safe encoding.

``StateWalker`` repeats the walk at every boundary. Dicts that hold only tensors (parameters), or only such dicts (the
optimizer's state of all parameters), keep their text as long as they have the same keys.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Container
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
    keys: _Path
    inner: list[_Path] | None
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
        return with_stack(lambda: _FullWalk().of(state))
    except RecursionError as error:
        raise StateError(
            "the state needs more than Python's stack: an encode function that was given to "
            "lazysnap.register_type never returns"
        ) from error


class StateWalker:
    """Walks the same state at every boundary. Not thread-safe."""

    def __init__(self) -> None:
        self._known: Walk | None = None

    def walk(self, state: dict[str, Any]) -> Walk:
        """Like ``walk``. While the structure is the same, ``names`` and ``paths`` are the same objects as before.

        Raises: StateError, naming the path of a value that the safe encoding does not know.
        """
        if self._known is not None:
            try:
                return _WalkAgain(self._known).of(state)
            except (_Changed, StateError, UnicodeEncodeError, RecursionError):  # the full walk names what differs
                self._known = None
        self._known = walk(state)
        return self._known


class _FullWalk(Encoder):
    """Names every tensor, and notes the text of dicts of tensors."""

    def __init__(self) -> None:
        super().__init__(self._name)
        self.tensors: list[torch.Tensor] = []
        self.paths: list[_Path] = []
        self.names: dict[str, None] = {}
        self.parts: dict[_Path, _TensorDict] = {}
        for kind in (dict, OrderedDict):
            self.table[kind] = partial(self._noted, self.table[kind])

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

    def _noted(self, encode: Callable[[Any], Any], value: Any) -> Any:
        first, children = len(self.tensors), value.values()
        encoded = encode(value)
        is_nested = all(type(child) is dict and _are_tensors(child.values()) for child in children)
        if value and (is_nested or _are_tensors(children)):
            inner = [*map(tuple, children)] if is_nested else None
            text = msgspec.Raw(_dump(encoded).encode("utf-8", "surrogatepass"))
            self.parts[tuple(self.path)] = _TensorDict(type(value), tuple(value), inner, first, text)
        return encoded


class _WalkAgain(Encoder):
    """Walks a state of a known structure. Raises: _Changed, if it has another one."""

    def __init__(self, known: Walk) -> None:
        super().__init__(self._name)
        self._known = known
        self._tensors: list[torch.Tensor] = []
        for kind in (dict, OrderedDict):
            self.table[kind] = partial(self._known_text, self.table[kind])

    def of(self, state: Any) -> Walk:
        """Return the walk over ``state``. Raises: also as ``encode``."""
        encoded, known = self.any(state), self._known
        if len(self._tensors) != len(known.names):
            raise _Changed
        text = msgspec.json.encode(encoded).decode()
        return Walk(self._tensors, known.paths, known.names, known.skeleton, text)

    def _name(self, tensor: torch.Tensor, path: _Path) -> str:
        number = len(self._tensors)
        if number == len(self._known.paths) or path != self._known.paths[number]:
            raise _Changed
        self._tensors.append(tensor)
        return self._known.names[number]

    def _known_text(self, encode: Callable[[Any], Any], value: Any) -> Any:
        part, children = self._known.parts.get(tuple(self.path)), value.values()
        if part is None:
            return encode(value)
        if (part.kind, part.keys, part.first) != (type(value), tuple(value), len(self._tensors)):
            raise _Changed
        if part.inner is not None:
            if set(map(type, children)) != {dict} or [*map(tuple, children)] != part.inner:
                raise _Changed
            children = [*chain.from_iterable(map(dict.values, children))]
        if not _are_tensors(children):
            raise _Changed
        self._tensors.extend(children)
        return part.text


def _are_tensors(values: Collection[Any]) -> bool:
    """True if all values are tensors, and there is at least one."""
    return bool(values) and set(map(type, values)) <= _TENSOR_TYPES


def _dump(encoded: Any) -> str:
    try:
        return msgspec.json.encode(encoded).decode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in names of files
        return json.dumps(encoded, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _unique(path: Collection[Any], taken: Container[str]) -> str:
    """Return a name such as ``state_dict.net.weight``. Paths with the same text (``1``, ``"1"``) get numbers."""
    base = name = ".".join(map(str, path)) or "value"
    number = 2
    while name in taken or name == "__metadata__":
        name = f"{base}#{number}"
        number += 1
    return name
