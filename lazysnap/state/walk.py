"""The walk over the training state: its tensors in a fixed order, and everything else in the safe encoding.

``StateWalker`` repeats the walk at every boundary. Where the structure did not change it reuses its last text. Dicts
that hold only tensors (parameters), or only such dicts (the optimizer's state of all parameters), cost a comparison
of their keys. Subtrees without tensors are encoded as one piece.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from lazysnap.errors import UnsupportedState
from lazysnap.shard.limits import with_stack
from lazysnap.shard.manifest import TAG
from lazysnap.state.codec import encode


@dataclass(frozen=True)
class Walk:
    """The tensors of a state: ``tensors[i]`` is at ``paths[i]`` in it, and is called ``names[i]`` in the text."""

    tensors: list[torch.Tensor]
    paths: list[tuple[Any, ...]]
    names: list[str]
    skeleton: Any
    """The encoded state when ``paths`` and ``names`` were made."""
    text: str
    """The encoded state as JSON."""


def walk(state: Any) -> Walk:
    """Walk ``state``, without copying anything.

    Raises: UnsupportedState, naming the path of a value that the safe encoding does not know.
    """
    try:
        return with_stack(lambda: _walk(state))
    except RecursionError as error:
        raise UnsupportedState(
            "the state needs more than Python's stack: an encode function that was given to "
            "lazysnap.register_type never returns"
        ) from error


def _walk(state: Any) -> Walk:
    tensors: list[torch.Tensor] = []
    paths: list[tuple[Any, ...]] = []
    names: dict[str, None] = {}

    def add(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = _unique(path, names)
        tensors.append(tensor)
        paths.append(path)
        names[name] = None
        return name

    skeleton = encode(state, tensor=add)
    return Walk(tensors, paths, list(names), skeleton, _dump(skeleton))


def _dump(encoded: Any) -> str:
    return json.dumps(encoded, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _unique(path: Collection[Any], taken: Container[str]) -> str:
    """Return a name such as ``state_dict.net.weight``. Paths with the same text (``1``, ``"1"``) get numbers."""
    base = name = ".".join(map(str, path)) or "value"
    number = 2
    while name in taken or name == "__metadata__":
        name = f"{base}#{number}"
        number += 1
    return name


_TENSOR_TYPES = {torch.Tensor, torch.nn.Parameter}


class _Changed(Exception):
    """The structure differs from the known one."""


@dataclass(frozen=True)
class _Node:
    """One container of the known structure: its type, its keys (or length), and the parts of its text."""

    kind: type
    keys: Any
    text: str | None
    """The whole text, if it depends only on the keys; ``None``: it is composed from the children."""
    openings: tuple[str, ...] | None
    """The text before each child; ``None``: a subtree without tensors, encoded each time."""
    closing: str
    are_tensors: tuple[bool, ...] = ()
    """True for each child that is a tensor."""
    inner: list[tuple[Any, ...]] | None = None
    """The keys of each child, where all of them are dicts of tensors."""


def _is_of_tensors(values: Iterable[Any]) -> bool:
    """True if all values are tensors, and there is at least one."""
    kinds = set(map(type, values))
    return bool(kinds) and kinds <= _TENSOR_TYPES


def _inner_values(children: Iterable[dict[Any, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, children))]


def _are_tensors(children: Iterable[Any]) -> tuple[bool, ...]:
    return tuple(type(child) in _TENSOR_TYPES for child in children)


def _refuse(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
    raise _Changed


class StateWalker:
    """Walks the same state at every boundary. Not thread-safe."""

    def __init__(self) -> None:
        self._walked: Walk | None = None
        self._nodes: list[_Node] = []
        self._at = 0
        self._parts: list[str] = []
        self._tensors: list[torch.Tensor] = []

    def walk(self, state: dict[str, Any]) -> Walk:
        """Like ``walk``. While the structure is the same, ``names`` and ``paths`` are the same objects as before.

        Raises: UnsupportedState, naming the path of a value that the safe encoding does not know.
        """
        if self._walked is not None:
            try:
                return self._again(state, self._walked)
            except Exception:  # noqa: BLE001  whatever differs, the full walk finds and names it
                self._walked = None
        walked = walk(state)
        with_stack(lambda: self._record_all(state, walked))
        self._walked = walked if TAG not in walked.skeleton else None
        return walked

    # ---------------------------------------------------------------- record the structure

    def _record_all(self, state: dict[str, Any], walked: Walk) -> None:
        self._nodes, self._tensors = [], []  # here, because ``with_stack`` may call it a second time
        self._record(state, walked, 0)

    def _record(self, value: Any, walked: Walk, depth: int) -> None:
        """Add the nodes of ``value``, in the order in which ``_write`` visits them."""
        kind = type(value)
        if kind in _TENSOR_TYPES:
            self._tensors.append(value)
        elif kind in (dict, OrderedDict, list, tuple):
            self._record_container(value, walked, depth)
        else:
            encode(value, tensor=self._count)

    def _count(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        self._tensors.append(tensor)
        return ""

    def _record_container(self, value: Any, walked: Walk, depth: int) -> None:
        kind = type(value)
        is_dict = kind in (dict, OrderedDict)
        keys = tuple(value) if is_dict else len(value)
        children = list(value.values()) if is_dict else list(value)
        before, place = len(self._tensors), len(self._nodes)
        is_nested = is_dict and all(type(child) is dict and _is_of_tensors(child.values()) for child in children)
        if is_dict and children and (is_nested or _is_of_tensors(children)):
            names = iter(walked.names[before:])
            self._tensors.extend(_inner_values(children) if is_nested else children)
            text = _dump(encode(value, tensor=lambda tensor, path: next(names)))
            inner = [*map(tuple, children)] if is_nested else None
            self._nodes.append(_Node(kind, keys, text, None, "", inner=inner))
            return
        openings, closing = _frame(value, kind)
        self._nodes.append(_Node(kind, keys, None, openings, closing, _are_tensors(children)))
        for child in children:
            self._record(child, walked, depth + 1)
        if len(self._tensors) == before and depth > 0:
            self._nodes[place:] = [_Node(kind, keys, None, None, "")]

    # ---------------------------------------------------------------- compose the text again

    def _again(self, state: dict[str, Any], known: Walk) -> Walk:
        self._at, self._parts, self._tensors = 0, [], []
        names = known.names
        self._write(state, names, 0)
        if self._at != len(self._nodes) or len(self._tensors) != len(names):
            raise _Changed
        return Walk(self._tensors, known.paths, names, known.skeleton, "".join(self._parts))

    def _write(self, value: Any, names: list[str], depth: int) -> None:
        kind = type(value)
        if kind in _TENSOR_TYPES:
            self._parts.append(_dump({TAG: "tensor", "v": names[len(self._tensors)]}))
            self._tensors.append(value)
        elif kind is dict or kind is OrderedDict or kind is list or kind is tuple:
            self._write_container(value, names, depth)
        else:
            self._parts.append(_dump(encode(value, tensor=self._sink(names), depth=depth)))

    def _write_container(self, value: Any, names: list[str], depth: int) -> None:
        node = self._nodes[self._at]
        self._at += 1
        kind = type(value)
        is_dict = kind is dict or kind is OrderedDict
        if node.kind is not kind:
            raise _Changed
        if node.text is None and node.openings is None:
            self._parts.append(_dump(encode(value, tensor=_refuse, depth=depth)))
            return
        if node.keys != (tuple(value) if is_dict else len(value)):
            raise _Changed
        children = value.values() if is_dict else value
        if node.text is not None:
            if node.inner is not None:
                if set(map(type, children)) != {dict} or [*map(tuple, children)] != node.inner:
                    raise _Changed
                children = _inner_values(children)
            if not _is_of_tensors(children):
                raise _Changed
            self._tensors.extend(children)
            self._parts.append(node.text)
            return
        if node.are_tensors != _are_tensors(children):
            raise _Changed
        for opening, child in zip(node.openings or (), children, strict=True):
            self._parts.append(opening)
            self._write(child, names, depth + 1)
        self._parts.append(node.closing)

    def _sink(self, names: list[str]) -> Callable[[torch.Tensor, tuple[Any, ...]], str]:
        def take(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
            self._tensors.append(tensor)
            return names[len(self._tensors) - 1]

        return take


def _frame(value: Any, kind: type) -> tuple[tuple[str, ...], str]:
    """Return the text around the children of a container, exactly as ``encode`` writes it."""
    if kind is list or kind is tuple:
        before = "[" if kind is list else _dump({TAG: "tuple", "v": []})[:-2]
        openings = tuple("," if index else before for index in range(len(value)))
        closing = "]" if kind is list else "]}"
        return (openings, closing) if len(value) else ((), before + closing)
    if kind is dict and all(type(key) is str and key != TAG for key in value):
        openings = tuple(("," if index else "{") + _dump(key) + ":" for index, key in enumerate(value))
        return (openings, "}") if value else ((), "{}")
    before = _dump({TAG: kind.__name__, "v": []})[:-2]
    keys = [_dump(encode(key, tensor=_refuse)) for key in value]
    openings = tuple(("],[" if index else before + "[") + key + "," for index, key in enumerate(keys))
    return (openings, "]]}") if keys else ((), before + "]}")
