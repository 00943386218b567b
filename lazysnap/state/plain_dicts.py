"""Dicts given as state: live tensors in them are filled in place, because an optimizer or a graph may hold them."""

from collections.abc import Iterator
from typing import Any

import torch

from lazysnap.errors import StateError
from lazysnap.state.codec import path_text
from lazysnap.state.modules import can_be_filled, fill


def restore_dict(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Load the values of a snapshot into a dict. Its tensors keep their identity if shape and dtype are the same."""
    with torch.no_grad():
        _fill(live, saved)


def check_dict(path: str, live: dict[Any, Any], saved: Any) -> None:
    """Check that a snapshot has a dict, and that its values fit the trained live tensors.

    Raises: StateError.
    """
    if not isinstance(saved, dict):
        raise StateError(
            f"{path_text((path,))}: the snapshot has {type(saved).__name__} under this name, the live object is a "
            "dict. Nothing was loaded. Name the objects as when the snapshot was taken"
        )
    for place, tensor, value in _pairs(live, saved, (path,)):
        if tensor.requires_grad and not can_be_filled(tensor, value):
            saved_form = type(value).__name__
            if isinstance(value, torch.Tensor):
                saved_form = f"{value.dtype} {list(value.shape)}"
            raise StateError(
                f"{path_text(place)}: the snapshot has {saved_form}, the live tensor, which is trained, is "
                f"{tensor.dtype} {list(tensor.shape)}. Nothing was loaded. Make it as when the snapshot was taken"
            )


def _pairs(live: Any, saved: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor, Any]]:
    """Yield path, live tensor and saved value for each live tensor whose place exists in the snapshot."""
    if isinstance(live, torch.Tensor):
        yield path, live, saved
    elif isinstance(live, dict) and isinstance(saved, dict):
        for key in live.keys() & saved.keys():
            yield from _pairs(live[key], saved[key], (*path, key))
    elif isinstance(live, (list, tuple)) and isinstance(saved, (list, tuple)):
        for index, (item, value) in enumerate(zip(live, saved, strict=False)):
            yield from _pairs(item, value, (*path, index))


def _fill(live: Any, saved: Any) -> Any:
    """Return the value that replaces ``live``: ``live`` itself, filled, or ``saved``."""
    if can_be_filled(live, saved):
        fill(live, saved)
        return live
    if isinstance(live, dict) and isinstance(saved, dict):  # also for an OrderedDict, which is saved as a dict
        values = {}
        for key, value in saved.items():
            values[key] = _fill(live.get(key), value)
        live.clear()
        live.update(values)
        return live
    if type(live) is not type(saved):
        return saved
    if isinstance(live, list):
        filled = list(map(_fill, live, saved))  # as many as the shorter one has
        live[:] = filled + saved[len(filled) :]
        return live
    if type(live) is tuple and len(live) == len(saved):
        return tuple(map(_fill, live, saved))
    return saved
