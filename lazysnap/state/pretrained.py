"""The files that models of Transformers and PEFT save with their weights. Snapshots contain them for exports."""

import copy
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from typing import Any, Literal

import torch

from lazysnap.data.layout import is_first_rank

logger = logging.getLogger(__name__)


def pretrained(modules: Mapping[str, torch.nn.Module]) -> str | None:
    """Return the files of these modules as JSON; ``None`` on ranks other than 0, or if none has ``save_pretrained``.

    Neither package is imported. Errors become warnings: an export then needs the files from elsewhere.
    Blocks: some milliseconds.
    """
    if not is_first_rank():
        return None  # exports read the small state of rank 0
    descriptions = {}
    for name, module in modules.items():
        if not hasattr(module, "save_pretrained") or not hasattr(getattr(module, "config", None), "to_json_string"):
            continue  # of other packages, which need other files
        if getattr(module, "_hf_peft_config_loaded", False):
            continue  # after add_adapter: it would save the adapter, with names that only it knows
        try:
            if hasattr(module, "get_base_model"):
                descriptions[name] = _adapter(module)
            else:
                descriptions[name] = _model(module)
        except Exception as error:  # noqa: BLE001  code of the model; snapshots are taken all the same
            logger.warning("the config of %r is not in the snapshots, exports need --config: %s", name, error)
    if not descriptions:
        return None
    return json.dumps(descriptions)


def _model(module: Any) -> dict[str, Any]:
    """See ``PreTrainedModel.save_pretrained``."""
    config = copy.deepcopy(module.config)
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        if module.can_generate():
            module.generation_config.save_pretrained(directory)
        return {"files": _texts(directory)}


def _adapter(module: Any) -> dict[str, Any]:
    """See ``PeftModel.save_pretrained``."""
    from peft import get_peft_model_state_dict  # installed: the model is one of its classes

    name = module.active_adapter
    config = copy.deepcopy(module.peft_config[name])
    base = module.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        kind = type(base)
        mapping = {"base_model_class": kind.__name__.removeprefix("FSDP"), "parent_library": kind.__module__}
    # "auto" may ask the hub for the size of the vocabulary, which must not happen in a training.
    with_embeddings: Literal[False, "auto"] = False
    if os.path.isdir(config.base_model_name_or_path or ""):
        with_embeddings = "auto"
    state = module.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    saved = get_peft_model_state_dict(module, state, adapter_name=name, save_embedding_layers=with_embeddings)
    weights = {key: names[id(tensor)] for key, tensor in saved.items()}
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory, auto_mapping=mapping)
        return {"files": _texts(directory), "weights": weights}


def _texts(directory: str) -> dict[str, str]:
    texts = {}
    for name in sorted(os.listdir(directory)):
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            texts[name] = file.read()
    return texts
