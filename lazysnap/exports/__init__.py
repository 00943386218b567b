"""Snapshots in the formats of other tools: safetensors, Lightning, ``torch.save``, DCP, Accelerate.

Nothing here needs the code of the model. Only ``accelerate``, ``checkpoint``, ``load_weights`` and ``weights_only``
import torch.
"""
