"""A log that grows with the training, as text: each snapshot adds only what is new."""

import json
from typing import Any

import torch

from lazysnap.errors import ShardCorrupt, UnsupportedState
from lazysnap.state.codec import decode, encode, path_text


class History:
    """A list of logged values, to which training appends."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._last: Any = None

    def text(self, entries: list[dict[str, Any]]) -> str:
        """One line of JSON for each entry, as it was when it was logged. Raises: UnsupportedState, for a tensor."""
        known = len(self._lines)
        if known and (known > len(entries) or entries[known - 1] is not self._last):
            self._lines, known = [], 0
        self._lines += [json.dumps(encode(entry, tensor=_refuse)) for entry in entries[known:]]
        self._last = entries[-1] if entries else None
        return "\n".join(self._lines)


def read_history(text: str) -> list[dict[str, Any]]:
    """The entries of a ``text``. Raises: ShardCorrupt."""
    return [decode(json.loads(line), tensor=_no_tensor) for line in text.split("\n") if line]


def _refuse(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
    raise UnsupportedState(f"a tensor was logged as {path_text(path)}, which no checkpoint can hold: log its item()")


def _no_tensor(name: str) -> torch.Tensor:
    raise ShardCorrupt(f"the log holds a tensor {name!r}, which no snapshot has there")
