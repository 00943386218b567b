"""Walking a state whose structure is known: the text of what did not change is taken from the last time.

Published systems lose most of what is left of their stall in this walk. Dicts that hold nothing but tensors (the
parameters, each parameter's optimizer state) cost a comparison of their keys; subtrees without tensors are encoded
anew as one piece.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap.shard.limits import with_stack
from lazysnap.shard.manifest import TAG
from lazysnap.state.codec import encode
from lazysnap.state.walk import LENIENT_KEYS, Walk, walk

_TENSOR_TYPES = {torch.Tensor, torch.nn.Parameter}


class _Changed(Exception):
    """The structure is not the one that was learnt."""


@dataclass(frozen=True)
class _Node:
    """One container as it was: its type, its keys (or length), and how its text is put together."""

    kind: type
    keys: Any
    text: str | None
    """The whole text, where it depends on nothing but the keys; ``None``: put together from the children."""
    openings: tuple[str, ...] | None
    """What stands before each child; ``None``: a subtree without tensors, encoded anew each time."""
    closing: str
    are_tensors: tuple[bool, ...] = ()
    """Which children are tensors."""


def _dump(encoded: Any) -> str:
    return json.dumps(encoded, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _are_tensors(children: Iterable[Any]) -> tuple[bool, ...]:
    return tuple(type(child) in _TENSOR_TYPES for child in children)


def _refuse(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
    raise _Changed


class StateWalker:
    """Walks the same state again and again. Not thread-safe."""

    def __init__(self) -> None:
        self._walked: Walk | None = None
        self._nodes: list[_Node] = []
        self._at = 0
        self._parts: list[str] = []
        self._tensors: list[torch.Tensor] = []

    def walk(self, state: dict[str, Any]) -> Walk:
        """As ``walk``; with the very lists of names and paths of the last time while the structure is the same.

        Raises: UnsupportedState, naming the path of a value that the safe encoding does not know.
        """
        if self._walked is not None:
            try:
                return self._again(state, self._walked)
            except Exception:  # noqa: BLE001  whatever is different: the full walk finds it out, and names the place
                self._walked = None
        walked = walk(state)
        with_stack(lambda: self._learn_all(state, walked))
        self._walked = walked if TAG not in walked.skeleton else None
        return walked

    # ---------------------------------------------------------------- the first time

    def _learn_all(self, state: dict[str, Any], walked: Walk) -> None:
        self._nodes, self._tensors = [], []
        self._learn(state, walked, 0)

    def _learn(self, value: Any, walked: Walk, depth: int) -> None:
        """Add the nodes of ``value``, in the order in which ``_write`` comes by them."""
        kind = type(value)
        if kind in _TENSOR_TYPES:
            self._tensors.append(value)
        elif kind in (dict, OrderedDict, list, tuple):
            self._learn_container(value, walked, depth)
        else:
            encode(value, tensor=self._count)

    def _count(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        self._tensors.append(tensor)
        return ""

    def _learn_container(self, value: Any, walked: Walk, depth: int) -> None:
        kind = type(value)
        is_dict = kind in (dict, OrderedDict)
        keys = tuple(value) if is_dict else len(value)
        children = list(value.values()) if is_dict else list(value)
        before, place = len(self._tensors), len(self._nodes)
        if is_dict and children and set(map(type, children)) <= _TENSOR_TYPES:
            names = iter(walked.names[before:])
            self._tensors.extend(children)
            text = _dump(encode(value, tensor=lambda tensor, path: next(names)))
            self._nodes.append(_Node(kind, keys, text, None, ""))
            return
        openings, closing = _frame(value, kind)
        self._nodes.append(_Node(kind, keys, None, openings, closing, _are_tensors(children)))
        for key, child in zip(value if is_dict else range(len(value)), children, strict=True):
            if depth == 0 and key in LENIENT_KEYS:
                # No resume needs it, and unknown types in it were warned of once: kept as it was.
                self._nodes.append(_Node(type(child), None, _dump(walked.skeleton[key]), None, ""))
            else:
                self._learn(child, walked, depth + 1)
        if len(self._tensors) == before and depth > 0:
            self._nodes[place:] = [_Node(kind, keys, None, None, "")]

    # ---------------------------------------------------------------- every other time

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
            if not set(map(type, children)) <= _TENSOR_TYPES:
                raise _Changed
            self._tensors.extend(children)
            self._parts.append(node.text)
            return
        if node.are_tensors != _are_tensors(children):
            raise _Changed
        keys = value if is_dict else range(len(value))
        for key, opening, child in zip(keys, node.openings or (), children, strict=True):
            self._parts.append(opening)
            if depth == 0 and key in LENIENT_KEYS:
                self._parts.append(self._nodes[self._at].text or "null")
                self._at += 1
            else:
                self._write(child, names, depth + 1)
        self._parts.append(node.closing)

    def _sink(self, names: list[str]) -> Callable[[torch.Tensor, tuple[Any, ...]], str]:
        def take(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
            self._tensors.append(tensor)
            return names[len(self._tensors) - 1]

        return take


def _frame(value: Any, kind: type) -> tuple[tuple[str, ...], str]:
    """The text round the children of a container, exactly as the encoding of the whole would have it."""
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
