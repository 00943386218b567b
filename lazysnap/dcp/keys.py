"""The keys of a snapshot's state: as DCP flattens it, and for optimizers also by the names of parameters.

The state stays encoded (lazysnap.state.codec); a value is decoded when it is loaded.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap.errors import ShardCorrupt
from lazysnap.shard.manifest import TAG
from lazysnap.state.codec import decode

logger = logging.getLogger(__name__)

Path = tuple["str | int", ...]

_MAPPINGS = frozenset({"dict", "OrderedDict", "Counter", "defaultdict"})
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of names that DDP, torch.compile, activation checkpointing and FSDP add."""


@dataclass(frozen=True)
class Leaf:
    """One value of the flattened state."""

    path: Path
    """Keys as text, positions in lists as integers."""
    encoded: Any

    @property
    def tensor(self) -> str | None:
        """The name of the tensor, ``None`` for any other value."""
        is_tensor = type(self.encoded) is dict and self.encoded.get(TAG) == "tensor"
        return str(self.encoded["v"]) if is_tensor else None


def canonical(key: str) -> str:
    """A key without the parts that wrappers add."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def leaves_of(state: Any) -> dict[str, Leaf]:
    """The leaves of an encoded state by key, as ``torch.distributed.checkpoint`` flattens a state dict.

    If two paths have the same key (``1`` and ``"1"``, dots in keys), the later one gets ``#2``.
    Raises: ShardCorrupt, if it is no encoding of a dict.
    """
    found: dict[str, Leaf] = {}
    try:
        if _pairs(state) is None:
            raise ShardCorrupt("the small state is no dict")
        for path, encoded in _walk((), state):
            key, taken, number = ".".join(map(str, path)), path, 2
            while key in found:
                # Also in the path: DCP joins the path again, and puts the value there.
                taken = (*path[:-1], f"{path[-1]}#{number}")
                key, number = ".".join(map(str, taken)), number + 1
            found[key] = Leaf(taken, encoded)
            if found[key].tensor is not None and type(encoded["v"]) is not str:
                raise ShardCorrupt(f"the small state has {encoded['v']!r:.50} where the name of a tensor must be")
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ShardCorrupt):
            raise
        raise ShardCorrupt(f"the small state is no valid encoding: {type(error).__name__}: {error}") from error
    return found


def _walk(path: Path, encoded: Any) -> Iterator[tuple[Path, Any]]:
    pairs = _pairs(encoded)
    if pairs is not None:
        for key, item in pairs:
            yield from _walk((*path, str(key)), item)
    elif type(encoded) is list and not _is_terminal(encoded):
        for index, item in enumerate(encoded):
            yield from _walk((*path, index), item)
    else:
        yield path, encoded


def _pairs(encoded: Any) -> list[tuple[Any, Any]] | None:
    """Keys and encoded values, if this decodes to a mapping."""
    if type(encoded) is not dict:
        return None
    if TAG not in encoded:
        return list(encoded.items())
    if encoded[TAG] in _MAPPINGS:
        return [(decode(key, tensor=_no_tensor), value) for key, value in encoded["v"]]
    return None


def _no_tensor(name: str) -> torch.Tensor:
    raise ShardCorrupt(f"the small state has the tensor {name!r} for a key")


def _is_terminal(items: Sequence[Any]) -> bool:
    """Whether DCP takes a list as one value: it contains neither tensors nor mappings, at any depth."""
    for item in items:
        if type(item) is dict and (TAG not in item or item[TAG] == "tensor" or item[TAG] in _MAPPINGS):
            return False
        if type(item) is list and not _is_terminal(item):
            return False
    return True


class StateKeys:
    """All keys of the state of one rank, and their values."""

    def __init__(self, state: Any, parameters: Mapping[str, Sequence[str]] | None) -> None:
        """``parameters``: as in the manifest. Raises: ShardCorrupt."""
        self._native = leaves_of(state)
        self._named: dict[str, Leaf] = {}
        self._groups: dict[str, list[str]] = {}
        """By key of a ``params`` list: the names of its parameters."""
        self.listed: dict[str, Leaf] = dict(self._native)
        """The result of a load without a model: optimizers by name if names are known, as in ``get_state_dict``."""
        for place, names in (parameters or {}).items():
            self._add_names(place, names)
        self._canonical: dict[str, Leaf | None] = {}
        for key, leaf in [*self._native.items(), *self._named.items()]:
            short = canonical(key)
            known = self._canonical.get(short, leaf)
            # Two values with one short name have full names only.
            self._canonical[short] = leaf if known is leaf else None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.find(key) is not None

    def find(self, key: str) -> Leaf | None:
        """The value with this key, or with one that differs only by what wrappers add."""
        exact = self._native.get(key) or self._named.get(key) or self.listed.get(key)
        return exact or self._canonical.get(canonical(key))

    def encoded(self, key: str, current: Any) -> Any:
        """The encoded value for ``key``, in the form of ``current``, the value that it replaces.

        Parameters of an optimizer are numbers in ``optimizer.state_dict()`` and names in ``get_state_dict``.
        """
        leaf = self.find(key)
        if leaf is None:
            raise ShardCorrupt(f"the snapshot has no {key!r}")
        names = self._groups.get(".".join(map(str, leaf.path)))
        if names is None or (isinstance(current, list) and current and not isinstance(current[0], str)):
            return leaf.encoded
        spelled = {canonical(name): name for name in current} if isinstance(current, list) else {}
        return [spelled.get(canonical(name), canonical(name)) for name in names]

    def _add_names(self, place: str, names: Sequence[str]) -> None:
        """Add keys with the names of parameters for one optimizer."""
        found: dict[str, Leaf] = {}
        listed: dict[str, Leaf] = {}
        numbered: list[str] = []
        prefix = f"{place}."
        groups: dict[str, tuple[list[str], dict[str, Leaf]]] = {}
        for key, leaf in self._native.items():
            if not key.startswith(prefix):
                continue
            depth = _depth(leaf.path, place)
            kind, rest = leaf.path[depth : depth + 1], leaf.path[depth + 1 :]
            if kind == ("state",) and len(rest) > 1 and str(rest[0]).isdecimal() and int(rest[0]) < len(names):
                name = names[int(rest[0])]
                found[_join(place, "state", name, *rest[1:])] = leaf
                path = (*leaf.path[: depth + 1], canonical(name), *rest[1:])
                listed[_join(*path)] = Leaf(path, leaf.encoded)
                numbered.append(key)
            elif kind == ("param_groups",) and len(rest) > 1:
                members, settings = groups.setdefault(str(rest[0]), ([], {}))
                if rest[1:] == ("params",):
                    members += [names[number] for number in _numbers(leaf.encoded, len(names))]
                    self._groups[key] = members
                else:
                    settings[_join(*rest[1:])] = leaf
        # As with StateDictOptions(flatten_optimizer_state_dict=True).
        for members, settings in groups.values():
            for name in members:
                found.update({_join(place, "param_groups", name, what): leaf for what, leaf in settings.items()})
        unclear = [key for key, leaf in found.items() if self._native.get(key, leaf) is not leaf]
        if unclear or len(listed) != len(numbered):
            logger.warning(
                "%s: names of parameters cannot be told from their numbers (%s): load it as optimizer.state_dict() "
                "gives it",
                place,
                ", ".join(unclear[:3]),
            )
            for key in [key for key in self._groups if key.startswith(prefix)]:
                del self._groups[key]
            return
        self._named.update(found)
        for key in numbered:
            del self.listed[key]
        self.listed.update(listed)


def _join(*parts: "str | int") -> str:
    return ".".join(map(str, parts))


def _depth(path: Path, place: str) -> int:
    """How many parts of ``path`` form ``place``; 0 if ``path`` does not begin with it."""
    depth, length = 0, -1
    while depth < len(path) and length < len(place):
        length += len(str(path[depth])) + 1
        depth += 1
    return depth if length == len(place) else 0


def _numbers(encoded: Any, count: int) -> list[int]:
    numbers = encoded if type(encoded) is list else []
    return numbers if all(type(number) is int and 0 <= number < count for number in numbers) else []
