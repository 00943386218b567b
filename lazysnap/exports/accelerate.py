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
from typing import Any

import torch

from lazysnap import faults
from lazysnap.errors import StateError
from lazysnap.exports.job import Job
from lazysnap.exports.safetensors import add_file, tied_names
from lazysnap.exports.states import Outline, parts_of, read_state
from lazysnap.exports.torch_file import TorchFile
from lazysnap.snapshots.assembly import JoinedTensor, WholeSnapshot
from lazysnap.snapshots.reads import Reads
from lazysnap.state.scalars import plain_numbers

FACTS, RNG = "accelerate", "rng"
OF_EVERY_RANK = (FACTS, RNG)
"""The parts that are read from every rank; all others from rank 0."""
_RNG_NAMES = {
    "python": "random_state",
    "numpy": "numpy_random_seed",
    "torch": "torch_manual_seed",
    "cuda": "torch_cuda_manual_seed",
}


def parts_called(state: Mapping[str, Any], kind: str) -> list[str]:
    """Return the parts ``kind``, ``kind_1``, … (or ``kind_0``, ``kind_1``, …) of a state, in order."""
    first = [name for name in (kind, f"{kind}_0") if name in state]
    rest: list[str] = []
    while f"{kind}_{len(rest) + 1}" in state:
        rest.append(f"{kind}_{len(rest) + 1}")
    return first[:1] + rest


def write_stock(whole: WholeSnapshot, job: Job, path: str) -> list[str]:
    """Write the files of ``save_state`` into the directory ``path``; return notes for the user: none.

    Blocks. Raises: StateError, if this is no state of an Accelerator, or for a value that cannot be
    pickled, or weights that safetensors refuses; FormatError; LevelError; OSError.
    """
    outline, reads = Outline(whole), Reads()
    state = outline.state(parts_of(None))
    others = [WholeSnapshot(whole.snapshot, rank) for rank in range(1, whole.snapshot.plan.world_size)]
    ranks = [outline.read({part: state.get(part) for part in OF_EVERY_RANK})]
    ranks += [read_state(rank, parts_of(OF_EVERY_RANK)) for rank in others]
    if not all(isinstance(rank.get(part), Mapping) for rank in ranks for part in OF_EVERY_RANK):
        raise StateError(
            f"a snapshot of an Accelerator has the parts {list(OF_EVERY_RANK)}, this one has {sorted(state)}: "
            "export it in another format"
        )
    facts = ranks[0][FACTS]
    with contextlib.ExitStack() as stack:
        files = []

        def save(value: Any, name: str) -> None:
            faults.point("export.accelerate.file")
            files.append(TorchFile(value, os.path.join(path, name), outline, stack, reads))

        for index, part in enumerate(facts.get("models", parts_called(state, "model"))):
            prefix = facts.get("prefixes", {}).get(part, "")
            weights = {f"{prefix}{name}": value for name, value in state[part].items()}
            if facts.get("safe_serialization", True):
                faults.point("export.accelerate.file")
                chosen = _tensors_of(weights, outline)
                add_file(reads, stack, os.path.join(path, _numbered("model.safetensors", index)), chosen, {})
            else:
                save(weights, _numbered("pytorch_model.bin", index))
        for kind in ("optimizer", "scheduler"):
            for index, part in enumerate(parts_called(state, kind)):
                save(state[part], _numbered(f"{kind}.bin", index))
        for index, part in enumerate(parts_called(state, "loader")):
            if part in facts.get("stateful_loaders", {}):
                save(facts["stateful_loaders"][part], _numbered("dl_state_dict.bin", index))
        if "scaler" in state:
            save(plain_numbers(outline.read(state["scaler"])), "scaler.pt")
        for index, part in enumerate(parts_called(state, "custom")):
            save(state[part], f"custom_checkpoint_{index}.pkl")
        job.fill(reads)
        for file in files:
            file.seal()
    for index, rank in enumerate(ranks):
        faults.point("export.accelerate.file")
        torch.save(_random_states(rank, index), os.path.join(path, f"random_states_{index}.pkl"))
    return []


def _numbered(name: str, index: int) -> str:
    """Return the name of a file of a kind: the first one has no number."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}_{index}.{suffix}" if index else name


def _random_states(rank: Mapping[str, Any], index: int) -> dict[str, Any]:
    rng = rank[RNG]
    missing = {"python", "numpy", "torch"} - set(rng)
    if missing:
        raise StateError(f"rank {index} has no random state of {sorted(missing)}, which load_state() asks for")
    return {"step": rank[FACTS].get("step", 0), **{_RNG_NAMES[name]: rng[name] for name in _RNG_NAMES if name in rng}}


def _tensors_of(weights: Mapping[str, Any], outline: Outline) -> dict[str, JoinedTensor]:
    """Return the weights to write: of tied ones the first, as Accelerate does; ``load_state`` ties them again."""
    others = sorted(name for name, value in weights.items() if not isinstance(value, torch.Tensor))
    if others:
        raise StateError(
            f"safetensors holds tensors only, the weights have {others[:3]}: use save_state(safe_serialization=False)"
        )
    found = {name: source for name, value in weights.items() if (source := outline.source(value)) is not None}
    tied = tied_names(found, list(found))
    return {name: tensor for name, tensor in found.items() if name not in tied}
