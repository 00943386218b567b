"""State made of types that ``torch.load(weights_only=True)`` reads: the default of torch, and so of Lightning."""

import argparse
import datetime
import decimal
import pathlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

_SAME = (bool, int, float, str, bytes, complex, torch.Tensor, torch.Size, torch.dtype, torch.device, type(None))


class Plainer:
    """Replaces values of other types, and remembers where."""

    def __init__(self) -> None:
        self.changed: dict[str, list[str]] = {}
        """By kind of change, the paths in the state."""

    def plain(self, value: Any, path: str = "") -> Any:
        """``value`` without types that are refused."""
        if type(value) in (*_SAME, bytearray) or isinstance(value, torch.Tensor):
            return value
        if type(value) in (dict, OrderedDict, Counter):
            return type(value)(
                {self.plain(key, path): self.plain(item, f"{path}.{key}") for key, item in value.items()}
            )
        if type(value) is list:
            return [self.plain(item, f"{path}.{index}") for index, item in enumerate(value)]
        if type(value) is tuple:
            return tuple(self.plain(item, f"{path}.{index}") for index, item in enumerate(value))
        if type(value) is set:
            return {self.plain(item, path) for item in value}
        return self._other(value, path)

    def _other(self, value: Any, path: str) -> Any:
        if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
            return self._note(path, value, "dict", self.plain(vars(value), path))
        if isinstance(value, defaultdict):
            return self._note(path, value, "dict", self.plain(dict(value), path))
        if isinstance(value, (deque, range)):
            return self._note(path, value, "list", self.plain(list(value), path))
        if isinstance(value, frozenset):
            return self._note(path, value, "set", self.plain(set(value), path))
        if isinstance(value, (datetime.date, datetime.datetime)):
            return self._note(path, value, "text", value.isoformat())
        if isinstance(value, datetime.timedelta):
            return self._note(path, value, "seconds", value.total_seconds())
        if isinstance(value, (pathlib.PurePath, decimal.Decimal, torch.layout, torch.memory_format)):
            return self._note(path, value, "text", str(value))
        numpy = sys.modules.get("numpy")
        return self._note(path, value, "text", repr(value)) if numpy is None else self._numpy(value, path, numpy)

    def _numpy(self, value: Any, path: str, numpy: Any) -> Any:
        if isinstance(value, numpy.ndarray):
            try:
                return self._note(path, value, "tensor", torch.from_numpy(value.copy()))
            except TypeError:  # texts, dates: torch has no such dtype
                return self._note(path, value, "list", self.plain(value.tolist(), path))
        if isinstance(value, numpy.generic):
            return self._note(path, value, "number", self.plain(value.item(), path))
        if isinstance(value, numpy.dtype):
            return self._note(path, value, "text", value.str)
        return self._note(path, value, "text", repr(value))

    def _note(self, path: str, value: Any, became: str, result: Any) -> Any:
        self.changed.setdefault(f"{type(value).__module__}.{type(value).__qualname__} became {became}", []).append(
            path.removeprefix(".")
        )
        return result

    def notes(self) -> list[str]:
        """One line for each kind of change."""
        return [
            f"{what}: {', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
            for what, paths in sorted(self.changed.items())
        ]
