"""One walk over the training state: its tensors in a fixed order, and everything else in the safe encoding."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap.state.codec import encode

LENIENT_KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_name", "datamodule_hparams_name")
"""Top-level keys whose values no resume needs: unknown types there become plain values or text."""


@dataclass(frozen=True)
class Walk:
    """The state as walked: ``tensors[i]`` stands at ``paths[i]`` and is called ``names[i]`` in ``skeleton``."""

    tensors: list[torch.Tensor]
    paths: list[tuple[Any, ...]]
    names: list[str]
    skeleton: Any


def walk(state: Any, known: "tuple[Sequence[tuple[Any, ...]], Sequence[str]] | None" = None) -> Walk:
    """Walk ``state``, without copying anything.

    ``known`` are the paths and names of an earlier walk, used as long as the structure is the same.
    Raises: UnsupportedState, naming the path of a value that the safe encoding does not know.
    """
    walker = _Walker(known)
    skeleton = encode(state, tensor=walker.add, lenient=LENIENT_KEYS)
    if known is not None and (walker.changed or len(walker.paths) != len(known[0])):
        return walk(state)
    return Walk(walker.tensors, walker.paths, walker.names, skeleton)


class _Walker:
    def __init__(self, known: "tuple[Sequence[tuple[Any, ...]], Sequence[str]] | None") -> None:
        self.known_paths, self.known_names = known if known is not None else ((), ())
        self.fresh = known is None
        self.changed = False
        self.tensors: list[torch.Tensor] = []
        self.paths: list[tuple[Any, ...]] = []
        self.names: list[str] = []
        self.taken: set[str] = set()

    def add(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        index = len(self.tensors)
        self.tensors.append(tensor)
        self.paths.append(path)
        if self.fresh:
            name = _unique(path, self.taken)
            self.taken.add(name)
        elif index < len(self.known_paths) and self.known_paths[index] == path:
            name = self.known_names[index]
        else:
            self.changed = True
            return ""
        self.names.append(name)
        return name


def _unique(path: Collection[Any], taken: set[str]) -> str:
    """``state_dict.net.weight``; paths that read the same (``1`` and ``"1"``, dots in keys) get a number."""
    base = name = ".".join(map(str, path)) or "value"
    number = 2
    while name in taken or name == "__metadata__":
        name = f"{base}#{number}"
        number += 1
    return name
