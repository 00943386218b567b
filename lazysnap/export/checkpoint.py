"""A snapshot as one file of ``torch.save``: Lightning's checkpoint, or the state dicts of a plain loop."""

from typing import Any

import torch

from lazysnap.errors import UnsupportedState
from lazysnap.export.plain import Plainer
from lazysnap.export.weights import LIGHTNING_EXTRAS, is_lightning
from lazysnap.state.scalars import unpack


def lightning_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """The dictionary that Lightning's ``Trainer.save_checkpoint`` would have written at that moment.

    What the callback keeps beside it (position in the data, random streams, flags) has no place there.
    """
    checkpoint = {key: value for key, value in state.items() if key != LIGHTNING_EXTRAS}
    checkpoint["callbacks"] = unpack(checkpoint.get("callbacks", {}))
    return checkpoint


def as_others_know_it(state: dict[str, Any]) -> dict[str, Any]:
    """A Lightning checkpoint, or the state itself."""
    return lightning_checkpoint(state) if is_lightning(state) else state


def write_checkpoint(state: dict[str, Any], path: str, *, keep_types: bool) -> list[str]:
    """Write a new file, tensors straight from their memory; returns what had to be changed, a line each.

    ``keep_types``: nothing is changed; then ``weights_only=True`` may refuse the file.
    Blocks. Raises: OSError; UnsupportedState, for a value that cannot be pickled.
    """
    plainer = Plainer()
    content = as_others_know_it(state)
    if not keep_types:
        content = plainer.plain(content)
    try:
        torch.save(content, path)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedState(f"a value of the state cannot be pickled: {error}; leave --keep-types out") from error
    except RuntimeError as error:  # torch's writer reports a full disk so
        raise OSError(f"{path}: torch.save failed: {error}") from error
    return plainer.notes()
