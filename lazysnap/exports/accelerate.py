"""A snapshot in the layout of Accelerate's ``save_state``, for stock ``Accelerator.load_state(directory)``.

The parts of the state are named ``model``, ``model_1``, …, ``optimizer``, …, ``scheduler``, …, ``scaler``,
``custom_0``, …, ``rng`` and ``accelerate``. The last part holds ``step``, and these settings if they differ from the
defaults:

* ``safe_serialization``;
* ``models``: the parts to write, in order;
* ``prefixes``: by model part, the prefix that DDP and ``torch.compile`` add to names of weights;
* ``stateful_loaders``: by loader part, the state of its ``StatefulDataLoader``.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from lazysnap import faults
from lazysnap.data.streams import HOST_GENERATORS
from lazysnap.errors import StateError
from lazysnap.exports.checkpoint import save_torch
from lazysnap.exports.job import ExportJob
from lazysnap.exports.safetensors import add_file, owners_of, tied_names
from lazysnap.exports.states import mapped_state, parts_of, read_state
from lazysnap.snapshots.assembly import JoinedTensor, WholeSnapshot
from lazysnap.snapshots.reads import Reads
from lazysnap.state.codec import decode
from lazysnap.state.objects import RNG
from lazysnap.state.scalars import plain_numbers

Value = TypeVar("Value")

FACTS = "accelerate"
OF_EVERY_RANK = (FACTS, RNG)
"""The parts that are read from every rank; all others are read from rank 0."""
_NAMES_OF_GENERATORS = {
    "python": "random_state",
    "numpy": "numpy_random_seed",
    "torch": "torch_manual_seed",
    "cuda": "torch_cuda_manual_seed",
}
"""Accelerate's names of the generators that ``collect_rng`` returns."""


def numbered(kind: str, number: int, suffix: str = "") -> str:
    """Return the name of the n-th object of a kind, or of its file: ``model``, ``model_1``, …"""
    if number == 0:
        return f"{kind}{suffix}"
    return f"{kind}_{number}{suffix}"


def parts_called(state: Mapping[str, Any], kind: str) -> list[str]:
    """Return the parts ``kind``, ``kind_1``, … (or ``kind_0``, ``kind_1``, …) of a state, in order."""
    parts = []
    if kind in state:
        parts.append(kind)
    elif f"{kind}_0" in state:
        parts.append(f"{kind}_0")
    number = 1
    while numbered(kind, number) in state:
        parts.append(numbered(kind, number))
        number += 1
    return parts


def write_stock(whole: WholeSnapshot, job: ExportJob, path: str) -> list[str]:
    """Write the files of ``save_state`` into a new directory; return notes for the user (none).

    Blocks. Raises: StateError, if this is no state of an Accelerator, or for a value that cannot be pickled, or weights
    that safetensors refuses; FormatError; LevelError; OSError.
    """
    ranks = _ranks(whole)
    facts = ranks[0][FACTS]
    encoded = parts_of(None)(whole.meta.state)
    models = parts_called(encoded, "model")
    prefixes = {}
    for part in facts.get("models", models):
        prefixes[part] = facts.get("prefixes", {}).get(part, "")
    os.mkdir(path)
    if facts.get("safe_serialization", True):
        _write_weights(whole, job, path, prefixes)
        other_parts = parts_of(encoded.keys() - set(models))
        content = _pickled(mapped_state(whole, other_parts, job, path), facts)
    else:
        state = mapped_state(whole, parts_of(None), job, path)
        content = _pickled(state, facts)
        for index, (part, prefix) in enumerate(prefixes.items()):
            content[numbered("pytorch_model", index, ".bin")] = _with_prefix(state[part], prefix)
    for index, rank in enumerate(ranks):
        content[f"random_states_{index}.pkl"] = _random_states(rank, index)
    for name, value in content.items():
        faults.point("export.accelerate.file")
        save_torch(value, os.path.join(path, name))
    return []


def _pickled(state: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the pickles, without weights and random states, by file name."""
    content: dict[str, Any] = {}
    for kind in ("optimizer", "scheduler"):
        for index, part in enumerate(parts_called(state, kind)):
            content[numbered(kind, index, ".bin")] = state[part]
    for index, part in enumerate(parts_called(state, "loader")):
        if part in facts.get("stateful_loaders", {}):
            content[numbered("dl_state_dict", index, ".bin")] = facts["stateful_loaders"][part]
    if "scaler" in state:
        content["scaler.pt"] = plain_numbers(state["scaler"])
    for index, part in enumerate(parts_called(state, "custom")):
        content[f"custom_checkpoint_{index}.pkl"] = state[part]
    return content


def _ranks(whole: WholeSnapshot) -> list[dict[str, Any]]:
    """Return the parts that are read from every rank, by rank. Raises: StateError, if one has no such part."""
    snapshot = whole.snapshot
    ranks = []
    for number in range(snapshot.plan.world_size):
        rank = read_state(WholeSnapshot(snapshot, number), parts_of(OF_EVERY_RANK))
        ranks.append(rank)
        if not all(isinstance(rank.get(part), Mapping) for part in OF_EVERY_RANK):
            raise StateError(
                f"a snapshot of an Accelerator has the parts {list(OF_EVERY_RANK)}, this one has "
                f"{sorted(whole.meta.state)}: export it in another format"
            )
    return ranks


def _write_weights(whole: WholeSnapshot, job: ExportJob, path: str, prefixes: Mapping[str, str]) -> None:
    """Write a safetensors file for each model; of tied tensors only the first, as Accelerate does: ``load_state`` ties
    them.

    ``prefixes``: the beginning of the names of a model's weights, by its part of the state.
    """
    reads = Reads()
    with contextlib.ExitStack() as files:
        for index, (part, prefix) in enumerate(prefixes.items()):
            faults.point("export.accelerate.file")
            weights = _with_prefix(_tensors_of(whole, part), prefix)
            owners = owners_of(weights, tied_names(weights, list(weights)))
            add_file(reads, files, os.path.join(path, numbered("model", index, ".safetensors")), owners, {})
        job.fill(reads)


def _tensors_of(whole: WholeSnapshot, part: str) -> dict[str, JoinedTensor]:
    """Return the weights of one model. Raises: StateError, if it has other values; FormatError."""
    encoded = parts_of([part])(whole.meta.state)
    with whole.snapshot.naming():
        weights: dict[str, Any] = decode(encoded, tensor=whole.tensor)[part]
    no_tensor = sorted(name for name, value in weights.items() if not isinstance(value, JoinedTensor))
    if no_tensor:
        raise StateError(
            f"safetensors holds tensors only, the weights have {no_tensor[:3]}: use "
            "save_state(safe_serialization=False)"
        )
    return weights


def _with_prefix(weights: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    return {f"{prefix}{name}": value for name, value in weights.items()}


def _random_states(rank: Mapping[str, Any], index: int) -> dict[str, Any]:
    rng = rank[RNG]
    missing = HOST_GENERATORS - rng.keys()
    if missing:
        raise StateError(f"rank {index} has no random state of {sorted(missing)}, which load_state() asks for")
    states = {"step": rank[FACTS].get("step", 0)}
    for name, stock_name in _NAMES_OF_GENERATORS.items():
        if name in rng:
            states[stock_name] = rng[name]
    return states
