"""A snapshot in the layout of Accelerate's ``save_state``, for stock ``Accelerator.load_state(directory)``.

The state has these parts: ``model``, ``model_1``, …, ``optimizer``, …, ``scheduler``, …, ``scaler``, ``custom_0``, …,
``rng`` and ``accelerate``. The last holds ``step`` and, if they differ from the defaults, ``safe_serialization``,
``models`` (the parts to write, in order), ``prefixes`` (by model part, what DDP and ``torch.compile`` put before its
names) and ``stateful_loaders`` (by loader part, the state of its ``StatefulDataLoader``).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lazysnap import faults
from lazysnap.errors import StateMismatch, UnsupportedState
from lazysnap.state.scaler import plain_numbers

FACTS, RNG = "accelerate", "rng"
OF_EVERY_RANK = (FACTS, RNG)
"""The parts that are read from every rank; all others from rank 0."""
_RNG_NAMES = {
    "python": "random_state",
    "numpy": "numpy_random_seed",
    "torch": "torch_manual_seed",
    "cuda": "torch_cuda_manual_seed",
}


def parts_of(state: Mapping[str, Any], kind: str) -> list[str]:
    """The parts ``kind``, ``kind_1``, ``kind_2``, … (or ``kind_0``, ``kind_1``, …) of a state, in order."""
    first = [name for name in (kind, f"{kind}_0") if name in state]
    rest: list[str] = []
    while f"{kind}_{len(rest) + 1}" in state:
        rest.append(f"{kind}_{len(rest) + 1}")
    return first[:1] + rest


def write_stock(ranks: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write the files of ``save_state`` into the directory ``path``.

    ``ranks``: the state of rank 0, then for each other rank at least the parts ``OF_EVERY_RANK``.
    Blocks. Raises: StateMismatch, if this is no state of an Accelerator; UnsupportedState, for a value that cannot be
    pickled, or weights that safetensors refuses; OSError.
    """
    state = ranks[0]
    if not all(isinstance(rank.get(part), Mapping) for rank in ranks for part in OF_EVERY_RANK):
        raise StateMismatch(
            f"a snapshot of an Accelerator has the parts {list(OF_EVERY_RANK)}, this one has {sorted(state)}: "
            "export it in another format"
        )
    facts = state[FACTS]
    for index, part in enumerate(facts.get("models", parts_of(state, "model"))):
        prefix = facts.get("prefixes", {}).get(part, "")
        weights = {f"{prefix}{name}": value for name, value in state[part].items()}
        if facts.get("safe_serialization", True):
            _save_weights(weights, os.path.join(path, _numbered("model.safetensors", index)))
        else:
            _save(weights, os.path.join(path, _numbered("pytorch_model.bin", index)))
    for kind in ("optimizer", "scheduler"):
        for index, part in enumerate(parts_of(state, kind)):
            _save(state[part], os.path.join(path, _numbered(f"{kind}.bin", index)))
    for index, part in enumerate(parts_of(state, "loader")):
        if part in facts.get("stateful_loaders", {}):
            _save(facts["stateful_loaders"][part], os.path.join(path, _numbered("dl_state_dict.bin", index)))
    if "scaler" in state:
        _save(plain_numbers(state["scaler"]), os.path.join(path, "scaler.pt"))
    for index, part in enumerate(parts_of(state, "custom")):
        _save(state[part], os.path.join(path, f"custom_checkpoint_{index}.pkl"))
    for index, rank in enumerate(ranks):
        _save(_random_states(rank, index), os.path.join(path, f"random_states_{index}.pkl"))


def _numbered(name: str, index: int) -> str:
    """The first file of a kind has no number."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}_{index}.{suffix}" if index else name


def _random_states(rank: Mapping[str, Any], index: int) -> dict[str, Any]:
    rng = rank[RNG]
    missing = {"python", "numpy", "torch"} - set(rng)
    if missing:
        raise StateMismatch(f"rank {index} has no random state of {sorted(missing)}, which load_state() asks for")
    return {"step": rank[FACTS].get("step", 0), **{_RNG_NAMES[name]: rng[name] for name in _RNG_NAMES if name in rng}}


def _save_weights(weights: Mapping[str, Any], path: str) -> None:
    """Of tensors that share memory only the first is written, as stock does; ``load_state`` ties them again."""
    others = sorted(name for name, value in weights.items() if not isinstance(value, torch.Tensor))
    if others:
        raise UnsupportedState(
            f"safetensors holds tensors only, the weights have {others[:3]}: use save_state(safe_serialization=False)"
        )
    seen: set[tuple[int, torch.dtype, torch.Size]] = set()
    chosen = {}
    for name, value in weights.items():
        key = (value.data_ptr(), value.dtype, value.shape)
        if key not in seen or not value.numel():
            chosen[name] = value.contiguous()
        seen.add(key)
    faults.point("export.accelerate.file")
    try:
        save_file(chosen, path, metadata={"format": "pt"})
    except SafetensorError as error:  # so its writer reports a full disk
        raise OSError(f"{path}: {error}") from error
    except (KeyError, ValueError, RuntimeError) as error:
        raise UnsupportedState(f"{path}: safetensors refuses the weights: {error}") from error


def _save(value: Any, path: str) -> None:
    faults.point("export.accelerate.file")
    try:
        torch.save(value, path)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedState(f"{os.path.basename(path)}: a value cannot be pickled: {error}") from error
    except RuntimeError as error:  # so torch's writer reports a full disk
        raise OSError(f"{path}: torch.save failed: {error}") from error
