"""A snapshot as a file of ``torch.save``: the checkpoint of Lightning, or the state dicts of a plain loop."""

import contextlib
from typing import Any

from lazysnap.exports.job import Job
from lazysnap.exports.states import Outline, parts_of
from lazysnap.exports.torch_file import save_outlines
from lazysnap.exports.weights import EXTRAS, is_lightning, registered_names
from lazysnap.exports.weights_only import WeightsOnlyConverter
from lazysnap.snapshots.reads import Reads
from lazysnap.state.scalars import unpack
from lazysnap.state.scaler import plain_numbers


def stock_state(job: Job, outline: Outline) -> tuple[dict[str, Any], list[str]]:
    """Return the state as other programs read it, and notes for the user. Blocks. Raises: ShardCorrupt; LevelError.

    Of Lightning: the dictionary that ``Trainer.save_checkpoint`` would have written at that moment. It has no place for
    what the callback adds (position in the data, random streams, flags).
    """
    state = outline.state(parts_of(None))
    names = sorted(registered_names(job.whole.meta.state))
    notes = [f"values of the registered type {name!r} became what its encoder made" for name in names]
    if not is_lightning(state):
        return state, notes
    checkpoint = {key: value for key, value in state.items() if key != EXTRAS}
    checkpoint["callbacks"] = unpack(checkpoint.get("callbacks", {}))
    for key, value in checkpoint.items():
        if isinstance(value, dict) and "_growth_tracker" in value:  # of a precision plugin with a GradScaler
            checkpoint[key] = plain_numbers(outline.read(value))
    return checkpoint, notes


def write_checkpoint(job: Job, path: str) -> list[str]:
    """Write a new file; return one line for each kind of value that was converted.

    Blocks. Raises: OSError; UnsupportedState, for a value that cannot be pickled; ShardCorrupt; LevelError.
    """
    outline = Outline(job.whole)
    content, notes = stock_state(job, outline)
    converter = WeightsOnlyConverter()
    if not job.options.keep_types:
        content = converter.convert(content)
    reads = Reads()
    with contextlib.ExitStack() as files:
        file = save_outlines(content, path, outline, files, reads)
        job.fill(reads)
        file.seal()
    return notes + converter.notes()
