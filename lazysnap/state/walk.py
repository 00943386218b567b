"""One walk over the training state: its tensors in a fixed order, and everything else in the safe encoding."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap.errors import UnsupportedState
from lazysnap.shard.limits import with_stack
from lazysnap.state.codec import encode

LENIENT_KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_name", "datamodule_hparams_name")
"""Top-level keys whose values no resume needs: unknown types there become plain values or text."""


@dataclass(frozen=True)
class Walk:
    """The state as walked: ``tensors[i]`` stands at ``paths[i]`` and is called ``names[i]`` in the text."""

    tensors: list[torch.Tensor]
    paths: list[tuple[Any, ...]]
    names: list[str]
    skeleton: Any
    """The encoded state at the time when ``paths`` and ``names`` were made."""
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
            "the state: Python's stack is not deep enough for it: an encode function that was given to "
            "lazysnap.register_type, or something that it calls, does not come to an end"
        ) from error


def _walk(state: Any) -> Walk:
    walker = _Walker()
    skeleton = encode(state, tensor=walker.add, lenient=LENIENT_KEYS)
    text = json.dumps(skeleton, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Walk(walker.tensors, walker.paths, walker.names, skeleton, text)


class _Walker:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[tuple[Any, ...]] = []
        self.names: list[str] = []
        self.taken: set[str] = set()

    def add(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = _unique(path, self.taken)
        self.taken.add(name)
        self.tensors.append(tensor)
        self.paths.append(path)
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
