"""Snapshots in the formats of other tools: safetensors, Lightning, ``torch.save``, DCP, Accelerate.

Nothing here needs the code of the model. Only ``accelerate``, ``checkpoint`` and ``load_weights`` import torch.
"""
