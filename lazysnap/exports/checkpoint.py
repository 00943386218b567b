"""A snapshot as a file of ``torch.save``: the checkpoint of Lightning, or the state dicts of a plain loop."""

import argparse
import datetime
import decimal
import os
import pathlib
import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch

from lazysnap.console import some_of
from lazysnap.errors import StateError
from lazysnap.exports.job import ExportJob
from lazysnap.exports.states import mapped_state, parts_of
from lazysnap.exports.weights import is_lightning
from lazysnap.shard.manifest import EXTRAS
from lazysnap.snapshots.assembly import WholeSnapshot
from lazysnap.state.codec import registered_names
from lazysnap.state.scalars import plain_numbers, unpack

_ALLOWED = (
    *(bool, int, float, str, bytes, bytearray, complex, type(None)),
    *(torch.Tensor, torch.Size, torch.dtype, torch.device),
)
_CONVERSIONS: tuple[tuple[tuple[type, ...], str, Callable[[Any], Any]], ...] = (
    ((argparse.Namespace, types.SimpleNamespace), "dict", vars),
    ((defaultdict,), "dict", dict),
    ((deque, range), "list", list),
    ((frozenset,), "set", set),
    ((datetime.date,), "text", methodcaller("isoformat")),
    ((datetime.timedelta,), "seconds", datetime.timedelta.total_seconds),
    ((pathlib.PurePath, decimal.Decimal, torch.layout, torch.memory_format), "text", str),
)
"""Types, the names of the types that their values become, and the conversions."""
_SHOWN = 3
"""Maximum paths in a note."""


def stock_state(whole: WholeSnapshot, job: ExportJob, path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the state for other programs, mapped, and notes for the user; ``path``: path of the export.

    For Lightning it is the dictionary that ``Trainer.save_checkpoint`` would have written, without the values that the
    callback adds (position in the data, random streams, flags). Blocks. Raises: FormatError; LevelError; OSError.
    """
    state = mapped_state(whole, parts_of(None), job, os.path.dirname(path))
    notes = []
    for name in sorted(registered_names(whole.meta.state)):
        notes.append(f"values of the registered type {name!r} became what its encoder made")
    if not is_lightning(state):
        return state, notes
    checkpoint = dict(state)
    del checkpoint[EXTRAS]
    checkpoint["callbacks"] = unpack(checkpoint.get("callbacks", {}))
    for key, value in checkpoint.items():
        if isinstance(value, dict) and "_growth_tracker" in value:  # of a precision plugin with a GradScaler
            checkpoint[key] = plain_numbers(value)
    return checkpoint, notes


def write_checkpoint(whole: WholeSnapshot, job: ExportJob, path: str) -> list[str]:
    """Write a new file; return one line for each kind of value that was converted.

    Blocks. Raises: OSError; StateError, for a value that cannot be pickled; FormatError; LevelError.
    """
    content, notes = stock_state(whole, job, path)
    converter = _WeightsOnly()
    save_torch(converter.convert(content), path)
    return notes + converter.notes()


def save_torch(value: Any, path: str) -> None:
    """Call ``torch.save``. Blocks. Raises: StateError, for a value that cannot be pickled; OSError."""
    try:
        torch.save(value, path)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise StateError(f"{os.path.basename(path)}: a value cannot be pickled: {error}") from error
    except RuntimeError as error:  # torch's writer raises this for a full disk
        raise OSError(f"{path}: torch.save failed: {error}") from error


class _WeightsOnly:
    """Replaces values of types that ``torch.load(weights_only=True)``, the default, refuses; records their paths."""

    def __init__(self) -> None:
        self._changed: dict[str, list[str]] = {}
        """Paths in the state, by kind of change."""

    def convert(self, value: Any, path: str = "") -> Any:
        """Return ``value`` without refused types."""
        kind = type(value)
        if kind in _ALLOWED or isinstance(value, torch.Tensor):
            return value
        if kind in (dict, OrderedDict, Counter):
            converted = {}
            for key, item in value.items():
                converted_key = self.convert(key, path)
                converted[converted_key] = self.convert(item, f"{path}.{key}")
            return kind(converted)
        if kind in (list, tuple):
            return kind(self.convert(item, f"{path}.{index}") for index, item in enumerate(value))
        if kind is set:
            return {self.convert(item, path) for item in value}
        for kinds, became, conversion in _CONVERSIONS:
            if isinstance(value, kinds):
                return self._record(path, value, became, self.convert(conversion(value), path))
        return self._convert_numpy(value, path)

    def _convert_numpy(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            try:
                return self._record(path, value, "tensor", torch.from_numpy(value.copy()))
            except TypeError:  # texts, dates: torch has no such dtype
                return self._record(path, value, "list", self.convert(value.tolist(), path))
        if numpy is not None and isinstance(value, numpy.generic):
            return self._record(path, value, "number", self.convert(value.item(), path))
        if numpy is not None and isinstance(value, numpy.dtype):
            return self._record(path, value, "text", value.str)
        return self._record(path, value, "text", repr(value))

    def _record(self, path: str, value: Any, became: str, result: Any) -> Any:
        """Record a conversion, and return its ``result``."""
        kind = f"{type(value).__module__}.{type(value).__qualname__} became {became}"
        self._changed.setdefault(kind, []).append(path.removeprefix("."))
        return result

    def notes(self) -> list[str]:
        """Return one line for each kind of change."""
        notes = []
        for change, paths in sorted(self._changed.items()):
            notes.append(f"{change}: {some_of(paths, _SHOWN)}")
        return notes
