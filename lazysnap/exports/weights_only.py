"""Conversion of a state to types that ``torch.load(weights_only=True)`` reads, torch's default."""

import argparse
import datetime
import decimal
import pathlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

_ALLOWED = (
    *(bool, int, float, str, bytes, bytearray, complex, type(None)),
    *(torch.Tensor, torch.Size, torch.dtype, torch.device),
)
_CONVERSIONS: tuple[tuple[tuple[type, ...], str, Callable[[Any], Any]], ...] = (
    ((argparse.Namespace, types.SimpleNamespace), "dict", vars),
    ((defaultdict,), "dict", dict),
    ((deque, range), "list", list),
    ((frozenset,), "set", set),
    ((datetime.date,), "text", lambda value: value.isoformat()),
    ((datetime.timedelta,), "seconds", datetime.timedelta.total_seconds),
    ((pathlib.PurePath, decimal.Decimal, torch.layout, torch.memory_format), "text", str),
)
"""Types, the names of the types that their values become, and the conversions."""


class WeightsOnlyConverter:
    """Replaces values of other types, and records their paths."""

    def __init__(self) -> None:
        self._changed: dict[str, list[str]] = {}
        """Paths in the state, by kind of change."""

    def convert(self, value: Any, path: str = "") -> Any:
        """Return ``value`` without types that are refused."""
        kind = type(value)
        if kind in _ALLOWED or isinstance(value, torch.Tensor):
            return value
        if kind in (dict, OrderedDict, Counter):
            pairs = value.items()
            return kind({self.convert(key, path): self.convert(item, f"{path}.{key}") for key, item in pairs})
        if kind in (list, tuple):
            return kind(self.convert(item, f"{path}.{index}") for index, item in enumerate(value))
        if kind is set:
            return {self.convert(item, path) for item in value}
        for kinds, became, conversion in _CONVERSIONS:
            if isinstance(value, kinds):
                return self._note(path, value, became, self.convert(conversion(value), path))
        return self._convert_numpy(value, path)

    def _convert_numpy(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            try:
                return self._note(path, value, "tensor", torch.from_numpy(value.copy()))
            except TypeError:  # texts, dates: torch has no such dtype
                return self._note(path, value, "list", self.convert(value.tolist(), path))
        if numpy is not None and isinstance(value, numpy.generic):
            return self._note(path, value, "number", self.convert(value.item(), path))
        is_dtype = numpy is not None and isinstance(value, numpy.dtype)
        return self._note(path, value, "text", value.str if is_dtype else repr(value))

    def _note(self, path: str, value: Any, became: str, result: Any) -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__} became {became}"
        self._changed.setdefault(kind, []).append(path.removeprefix("."))
        return result

    def notes(self) -> list[str]:
        """Return one line for each kind of change."""
        return [
            f"{what}: {', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
            for what, paths in sorted(self._changed.items())
        ]
