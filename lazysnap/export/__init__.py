"""Snapshots in the formats of others: safetensors weights, Lightning and torch checkpoints, torch's distributed ones.

Nothing here needs the code of the model. Only ``checkpoint``, ``distributed``, ``loading`` and ``plain`` import torch.
"""
