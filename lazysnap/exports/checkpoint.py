"""A snapshot as a file of ``torch.save`` (Lightning's checkpoint, or state dicts), or as a directory of DCP."""

import warnings
from typing import Any

import torch

from lazysnap.errors import UnsupportedState
from lazysnap.exports.weights import LIGHTNING_EXTRAS, is_lightning
from lazysnap.exports.weights_only import WeightsOnlyConverter
from lazysnap.state.scalars import unpack
from lazysnap.state.scaler import plain_numbers


def lightning_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """The dictionary that Lightning's ``Trainer.save_checkpoint`` would have written at that moment.

    It has no place for what the callback adds (position in the data, random streams, flags).
    """
    checkpoint = {key: value for key, value in state.items() if key != LIGHTNING_EXTRAS}
    checkpoint["callbacks"] = unpack(checkpoint.get("callbacks", {}))
    for key, value in checkpoint.items():
        if isinstance(value, dict) and "_growth_tracker" in value:  # of a precision plugin with a GradScaler
            checkpoint[key] = plain_numbers(value)
    return checkpoint


def _as_stock(state: dict[str, Any]) -> dict[str, Any]:
    """A Lightning checkpoint, or the state itself."""
    return lightning_checkpoint(state) if is_lightning(state) else state


def write_checkpoint(state: dict[str, Any], path: str, *, keep_types: bool) -> list[str]:
    """Write a new file; returns one line for each kind of value that was converted.

    ``keep_types``: nothing is converted; then ``weights_only=True`` may refuse the file.
    Blocks. Raises: OSError; UnsupportedState, for a value that cannot be pickled.
    """
    converter = WeightsOnlyConverter()
    content = _as_stock(state)
    if not keep_types:
        content = converter.convert(content)
    try:
        torch.save(content, path)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedState(f"a value of the state cannot be pickled: {error}; leave --keep-types out") from error
    except RuntimeError as error:  # so torch's writer reports a full disk
        raise OSError(f"{path}: torch.save failed: {error}") from error
    return converter.notes()


def write_distributed(state: dict[str, Any], path: str) -> None:
    """Write a new directory; no process group is needed.

    Blocks. Raises: OSError; UnsupportedState, if two values get one name (DCP joins keys with points).
    """
    from torch.distributed.checkpoint.api import CheckpointException  # only here: it takes a second to import
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no process group
            save(_as_stock(state), checkpoint_id=path, no_dist=True)
    except ValueError as error:
        raise UnsupportedState(f"torch.distributed.checkpoint cannot hold this state: {error}") from error
    except CheckpointException as error:
        raise OSError(f"{path}: torch.distributed.checkpoint failed: {error}") from error
