"""The small state of a snapshot for people: straight from its encoding, so that nothing is decoded or run."""

from collections.abc import Callable, Iterable
from typing import Any

from rich.text import Text
from rich.tree import Tree

from lazysnap.cli.output import safe

TAG = "$"
_TEXT = 60
_ITEMS = 12
_INLINE = 8
_DEPTH = 40
"""Deeper states are cut, so that no file brings the program down."""

_PAIRS = ("dict", "OrderedDict", "Counter", "defaultdict", "Namespace", "SimpleNamespace")
_BRACKETS = {"tuple": "({})", "set": "{{{}}}", "frozenset": "{{{}}}"}
_LISTS = ("tuple", "set", "frozenset", "deque")


class StateTree:
    """Draws an encoded state."""

    def __init__(self, describe: Callable[[str], str], *, full: bool) -> None:
        """``describe``: what to say of the tensor of a name. ``full``: shorten nothing."""
        self._describe = describe
        self._full = full

    def draw(self, title: str, state: Any) -> Tree:
        """The whole of it."""
        tree = Tree(Text(title))
        self._add(tree, state, 0)
        return tree

    def _add(self, tree: Tree, value: Any, depth: int) -> None:
        items = list(_children(value) or ())
        shown = items if self._full else items[:_ITEMS]
        for key, child in shown:
            label = Text.assemble((safe(self._short(key)), "cyan"), ": ")
            leaf = self._leaf(child)
            if leaf is not None or depth >= _DEPTH:
                tree.add(label.append(leaf if leaf is not None else "…"))
                continue
            branch = tree.add(label.append(self._kind(child), "dim"))
            self._add(branch, child, depth + 1)
        if len(shown) < len(items):
            tree.add(Text(f"… {len(items) - len(shown)} more", "dim"))

    def _short(self, text: str) -> str:
        return text if self._full or len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"

    def _kind(self, value: Any) -> str:
        """A container in a word."""
        count = len(list(_children(value) or ()))
        name = str(value[TAG]) if isinstance(value, dict) and TAG in value else type(value).__name__
        if name == "registered":
            return safe(f"registered {value.get('n')!r}")
        return safe(f"{name}, {count}")

    def _leaf(self, value: Any) -> Text | None:
        """A value on one line, ``None`` for a container that needs more."""
        if isinstance(value, dict) and value.get(TAG) == "tensor":
            return Text(safe(self._describe(str(value.get("v")))), "green")
        children = _children(value)
        if children is None:
            return Text(safe(self._short(_plain(value))))
        items = [child for _, child in children]
        if not items:
            return Text(f"empty {self._kind(value).split(',')[0]}")
        tag = str(value.get(TAG, "dict")) if isinstance(value, dict) else "list"
        if tag in ("list", *_LISTS) and all(_children(item) is None and not _is_tensor(item) for item in items):
            few = items if self._full else items[:_INLINE]
            more = f", … {len(items)} items" if len(few) < len(items) else ""
            inner = ", ".join(safe(self._short(_plain(item))) for item in few)
            return Text(_BRACKETS.get(tag, "[{}]").format(f"{inner}{more}"))
        return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.get(TAG) == "tensor"


def _children(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Keys and values of a container, ``None`` for anything else."""
    if isinstance(value, list):
        return [(str(index), item) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return None
    tag = value.get(TAG)
    if TAG not in value:
        return list(value.items())
    inner = value.get("v")
    if tag in _LISTS and isinstance(inner, list):
        return [(str(index), item) for index, item in enumerate(inner)]
    if tag in _PAIRS and isinstance(inner, list):
        pairs = [pair for pair in inner if isinstance(pair, list) and len(pair) == 2]
        return [(_plain(key), item) for key, item in pairs]
    if tag == "registered":
        return [("value", inner)]
    return None


def _plain(value: Any) -> str:
    """A value without children."""
    if not isinstance(value, dict) or TAG not in value:
        return repr(value)
    tag, inner = value.get(TAG), value.get("v")
    if tag in ("bytes", "bytearray"):
        return f"{tag}, {len(inner) * 3 // 4 if isinstance(inner, str) else '?'} bytes"
    if tag in ("ndarray", "npscalar"):
        return f"{tag} {value.get('dtype')} {value.get('shape')}"
    if tag in ("int", "float"):
        return str(inner)
    return f"{tag} {inner}"
