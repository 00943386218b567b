"""Exports weights to a directory for ``from_pretrained`` of Transformers or PEFT. Needs only ``huggingface_hub``."""

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from lazysnap.errors import ConfigError, FormatError
from lazysnap.exports.job import ExportJob
from lazysnap.exports.safetensors import add_file, owners_of, tied_names
from lazysnap.exports.weights import chosen_tensors, path_of_weights
from lazysnap.shard.limits import load_json
from lazysnap.shard.manifest import EXTRAS, PRETRAINED
from lazysnap.snapshots.assembly import JoinedTensor, WholeSnapshot
from lazysnap.snapshots.reads import Reads

COPIED = re.compile(
    r"(config|generation_config|adapter_config|special_tokens_map|added_tokens|vocab|chat_template|processor_config"
    r"|preprocessor_config|video_preprocessor_config|tokenizer[a-z_]*)\.json|tokenizer\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model|vocab\.txt|merges\.txt|chat_template\.jinja|[A-Za-z_]\w{0,99}\.py"
)
"""Files that are copied from the directory ``config``: all files that ``from_pretrained`` reads, except weights."""
_NOTED = re.compile(r"[a-z_]{1,99}config\.json|config\.json")
"""Files whose text a snapshot may contain. None of them is code."""
SHARD_BYTES = 5_000_000_000
"""Maximum bytes of a file of weights, unless one tensor is larger."""
_FACTS_NESTING = 4
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def write_folder(whole: WholeSnapshot, job: ExportJob, path: str) -> list[str]:
    """Write a new directory; return notes for the user.

    The weights are those of one model, in files of at most ``SHARD_BYTES`` with an index; of a PEFT model only the
    adapter. Of tied tensors the first is written. ``config.json`` and the other files are copied from
    ``ExportJob.config``, else from the snapshot. Blocks. Raises: ConfigError, without a config; FormatError;
    StateError; LevelError; OSError.
    """
    facts = _facts(whole.meta.state, job.only)
    chosen = chosen_tensors(whole.meta.state, job.only)
    config_name = "config.json"
    weights_name = "model"
    adapter = facts.get("weights")
    if adapter is not None:
        config_name = "adapter_config.json"
        weights_name = "adapter_model"
        chosen = _adapter_tensors(adapter, chosen, whole.snapshot.plan.level)
    files = _copied(job.config)
    if config_name not in files and config_name not in facts["files"]:
        raise ConfigError(
            f"no {config_name}, without which from_pretrained loads nothing: this snapshot has none (it has one of "
            "models of Transformers and PEFT, but not from Lightning); `lazysnap export --config DIR` copies one"
        )
    tensors = {_plain(name): whole.tensor(stored) for name, stored in chosen.items()}
    owners = owners_of(tensors, tied_names(tensors, list(tensors)))
    os.mkdir(path)
    _write_weights(owners, weights_name, job, path)
    for name, text in facts["files"].items():
        if name not in files:
            pathlib.Path(path, name).write_text(text, encoding="utf-8")
    for name, source in files.items():
        shutil.copyfile(source, os.path.join(path, name))
    has_tokenizer = any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in files)
    if has_tokenizer or adapter is not None:
        return []
    return ["no tokenizer files: `lazysnap export --config DIR` copies those of a directory"]


def _adapter_tensors(adapter: Mapping[str, str], chosen: Mapping[str, str], level: str) -> dict[str, str]:
    """Return the names of the adapter's tensors in the snapshot, by their names in a file. Raises: FormatError."""
    tensors = {}
    for name, stored in adapter.items():
        if stored not in chosen:
            raise FormatError(f"{level}: the adapter's tensor {stored!r} is not in the state")
        tensors[name] = chosen[stored]
    return tensors


def _write_weights(tensors: Mapping[str, JoinedTensor], name: str, job: ExportJob, path: str) -> None:
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
        get_storage_size=attrgetter("size_bytes"),
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    reads = Reads()
    with contextlib.ExitStack() as files:
        for file_name, names in split.filename_to_tensors.items():
            shard = {tensor_name: tensors[tensor_name] for tensor_name in names}
            add_file(reads, files, os.path.join(path, file_name), shard, {})
        job.fill(reads)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        pathlib.Path(path, f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _facts(state: Any, only: str | None) -> dict[str, Any]:
    """Return the files and names of the chosen model that the snapshot holds, checked. Raises: FormatError."""
    text = None
    if isinstance(state, dict):
        extras = state.get(EXTRAS)
        if isinstance(extras, dict):
            text = extras.get(PRETRAINED)
    if text is None:
        return {"files": {}}
    try:
        by_part = load_json(text.encode(), _FACTS_NESTING)
        facts = by_part.get(path_of_weights(state, only), {"files": {}})
        weights = facts.get("weights", {})
        are_files_valid = all(_NOTED.fullmatch(name) and isinstance(text, str) for name, text in facts["files"].items())
        are_weights_valid = all(isinstance(stored, str) for stored in weights.values())
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FormatError(f"the small state has no valid {EXTRAS}.{PRETRAINED}: {error!r}") from error
    if not are_files_valid or not are_weights_valid:
        raise FormatError(f"the small state has names in {EXTRAS}.{PRETRAINED} that no training writes")
    return dict(facts)


def _copied(config: str | None) -> dict[str, str]:
    """Return the files to copy, by name. Raises: ConfigError, if there is no such directory."""
    if config is None:
        return {}
    if not os.path.isdir(config):
        raise ConfigError(f"config {os.fspath(config)!r}: no such directory; name one with a config.json in it")
    paths = {}
    for name in sorted(filter(COPIED.fullmatch, os.listdir(config))):
        path = os.path.join(config, name)
        if os.path.isfile(path):
            paths[name] = path
    return paths


def _plain(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
