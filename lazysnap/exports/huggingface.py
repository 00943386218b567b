"""Weights as a directory that ``from_pretrained`` of Transformers or PEFT loads: needs ``huggingface_hub`` alone."""

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

from lazysnap.errors import ConfigError, FormatError
from lazysnap.exports.job import ExportJob
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


def write_folder(whole: WholeSnapshot, job: ExportJob, path: str) -> list[str]:
    """Write a new directory; return notes for the user.

    The weights are those of one model, in files of at most ``shard_bytes`` with an index; of a PEFT model the adapter
    alone. Of tied tensors the first is written. ``config.json`` and the other files come from ``ExportJob.config``,
    else from the snapshot.
    Blocks. Raises: ConfigError, without a config; FormatError; StateError; LevelError; OSError.
    """
    facts = _facts(whole.meta.state, job.only)
    chosen = chosen_tensors(whole.meta.state, job.only)
    adapter = facts.get("weights")
    if adapter is not None:
        for stored in adapter.values():
            if stored not in chosen:
                raise FormatError(f"{whole.snapshot.plan.level}: the adapter's tensor {stored!r} is not in the state")
        chosen = {name: chosen[stored] for name, stored in adapter.items()}
    files = _copied(job.config)
    needed = "config.json" if adapter is None else "adapter_config.json"
    if needed not in files and needed not in facts["files"]:
        raise ConfigError(
            f"no {needed}, without which from_pretrained loads nothing: this snapshot has none (it has one of models "
            "of Transformers and PEFT, but not from Lightning); `lazysnap export --config DIR` copies one"
        )
    tensors = {_plain(name): whole.tensor(stored) for name, stored in chosen.items()}
    tied = tied_names(tensors, list(tensors))
    owners = {name: tensor for name, tensor in tensors.items() if name not in tied}
    os.mkdir(path)
    _write_weights(owners, "model" if adapter is None else "adapter_model", job, path)
    for name, text in facts["files"].items():
        if name not in files:
            pathlib.Path(path, name).write_text(text, encoding="utf-8")
    for name, source in files.items():
        shutil.copyfile(source, os.path.join(path, name))
    has_tokenizer = any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in files)
    if has_tokenizer or adapter is not None:
        return []
    return ["no tokenizer files: `lazysnap export --config DIR` copies those of a directory"]


def _write_weights(tensors: Mapping[str, JoinedTensor], stem: str, job: ExportJob, path: str) -> None:
    """Write the files that ``huggingface_hub`` splits such weights into, with an index if there are several.

    Blocks. Raises: ConfigError, without ``huggingface_hub``; StateError; FormatError; LevelError; OSError.
    """
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise ConfigError(
            "export --format huggingface splits weights as huggingface_hub does, which is not installed: "
            "`pip install huggingface_hub`"
        ) from error
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.size_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=job.shard_bytes,
    )
    reads = Reads()
    with contextlib.ExitStack() as files:
        for file_name, names in split.filename_to_tensors.items():
            shard = {name: tensors[name] for name in names}
            add_file(reads, files, os.path.join(path, file_name), shard, {})
        job.fill(reads)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        pathlib.Path(path, f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _facts(state: Any, only: str | None) -> dict[str, Any]:
    """Return the files and names of the chosen model that the snapshot holds, checked. Raises: FormatError."""
    extras = state.get(EXTRAS) if isinstance(state, dict) else None
    text = extras.get(_PRETRAINED) if isinstance(extras, dict) else None
    if text is None:
        return {"files": {}}
    try:
        by_part = load_json(text.encode(), _FACTS_NESTING)
        facts = by_part.get(place_of_weights(state, only), {"files": {}})
        weights = facts.get("weights", {})
        is_good = all(_NOTED.fullmatch(name) and isinstance(text, str) for name, text in facts["files"].items())
        is_good = is_good and all(isinstance(stored, str) for stored in weights.values())
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
    paths = {name: os.path.join(config, name) for name in sorted(filter(COPIED.fullmatch, os.listdir(config)))}
    return {name: path for name, path in paths.items() if os.path.isfile(path)}


def _plain(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
