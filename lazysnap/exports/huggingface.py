"""Weights as a directory that ``from_pretrained`` of Transformers or PEFT loads: needs neither these nor torch."""

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

from lazysnap.errors import ConfigError, FormatError
from lazysnap.exports.job import Job
from lazysnap.exports.safetensors import add_file, tied_names
from lazysnap.exports.weights import EXTRAS, chosen_tensors, place_of_weights
from lazysnap.shard.limits import load_json
from lazysnap.snapshots.assembly import JoinedTensor, WholeSnapshot
from lazysnap.snapshots.reads import Reads

COPIED = re.compile(
    r"(config|generation_config|adapter_config|special_tokens_map|added_tokens|vocab|chat_template|processor_config"
    r"|preprocessor_config|video_preprocessor_config|tokenizer[a-z_]*)\.json|tokenizer\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model|vocab\.txt|merges\.txt|chat_template\.jinja|[A-Za-z_]\w{0,99}\.py"
)
"""Files that are copied from the directory ``config``: all that ``from_pretrained`` reads, except weights."""
WRITTEN = re.compile(COPIED.pattern + r"|(adapter_)?model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")
"""All files that this format may have."""
_NOTED = re.compile(r"[a-z_]{1,99}config\.json|config\.json")
"""Files whose text a snapshot may hold. None of them is code."""
_FACTS_NESTING = 4
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_PRETRAINED = "pretrained"


def write_folder(whole: WholeSnapshot, job: Job, path: str) -> list[str]:
    """Write a new directory; return notes for the user.

    The weights are those of one model, in files of at most ``shard_bytes`` with an index; of a PEFT model the adapter
    alone. Of tied tensors the first is written. ``config.json`` and the other files come from ``Job.config``, else
    from the snapshot.
    Blocks. Raises: ConfigError, without a config; FormatError; StateError; LevelError; OSError.
    """
    state, only = whole.meta.state, job.only
    facts = _facts(state, only)
    chosen = chosen_tensors(state, only)
    adapter = facts.get("weights")
    if adapter is not None:
        chosen = {name: chosen[held] for name, held in adapter.items() if held in chosen}
        if len(chosen) < len(adapter):
            missing = next(held for held in adapter.values() if held not in chosen.values())
            raise FormatError(f"{whole.snapshot.plan.level}: the adapter's tensor {missing!r} is not in the state")
    files = _copied(job.config)
    needed = "config.json" if adapter is None else "adapter_config.json"
    if needed not in files and needed not in facts["files"]:
        raise ConfigError(
            f"no {needed}, without which from_pretrained loads nothing: this snapshot has none (it has one of models "
            "of Transformers and PEFT, but not from Lightning); `lazysnap export --config DIR` copies one"
        )
    tensors = {_plain(name): whole.tensor(stored) for name, stored in chosen.items()}
    tied = tied_names(tensors, list(tensors))
    os.mkdir(path)
    with contextlib.ExitStack() as stack:
        reads = Reads()
        stem = "model" if adapter is None else "adapter_model"
        shards = _shards({name: one for name, one in tensors.items() if name not in tied}, job.shard_bytes)
        weights: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            name = f"{stem}{part}.safetensors"
            weights.update(dict.fromkeys(shard, name))
            add_file(reads, stack, os.path.join(path, name), shard, {})
        if len(shards) > 1:
            size = sum(one.size_bytes for name, one in tensors.items() if name not in tied)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weights.items()))}
            pathlib.Path(path, f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for name, text in facts["files"].items():
            if name not in files:
                pathlib.Path(path, name).write_text(text, encoding="utf-8")
        for name, source in files.items():
            shutil.copyfile(source, os.path.join(path, name))
        job.fill(reads)
    has_tokenizer = any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in files)
    return (
        []
        if has_tokenizer or adapter is not None
        else ["no tokenizer files: `lazysnap export --config DIR` copies those of a directory"]
    )


def _facts(state: Any, only: str | None) -> dict[str, Any]:
    """Return the files and names of the chosen model that the snapshot holds, checked. Raises: FormatError."""
    extras = state.get(EXTRAS) if isinstance(state, dict) else None
    text = extras.get(_PRETRAINED) if isinstance(extras, dict) else None
    if text is None:
        return {"files": {}}
    try:
        found = load_json(text.encode(), _FACTS_NESTING)
        facts = found.get(place_of_weights(state, only), {"files": {}})
        weights = facts.get("weights", {})
        is_good = all(_NOTED.fullmatch(name) and isinstance(one, str) for name, one in facts["files"].items())
        is_good = is_good and all(isinstance(held, str) for held in weights.values())
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FormatError(f"the small state has no valid {EXTRAS}.{_PRETRAINED}: {error!r}") from error
    if not is_good:
        raise FormatError(f"the small state has names in {EXTRAS}.{_PRETRAINED} that no training writes")
    return dict(facts)


def _copied(config: str | None) -> dict[str, str]:
    """Return the files to copy, by name. Raises: ConfigError, if there is no such directory."""
    if config is None:
        return {}
    if not os.path.isdir(config):
        raise ConfigError(f"config {os.fspath(config)!r}: no such directory; name one with a config.json in it")
    names = sorted(filter(COPIED.fullmatch, os.listdir(config)))
    return {name: at for name in names if os.path.isfile(at := os.path.join(config, name))}


def _plain(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _shards(tensors: Mapping[str, JoinedTensor], most_bytes: int) -> list[dict[str, JoinedTensor]]:
    """Return the tensors of each file, in their order."""
    shards: list[dict[str, JoinedTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.size_bytes > most_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.size_bytes
    return shards
