"""Snapshots in the formats of other tools: safetensors, Hugging Face, Lightning, ``torch.save``, DCP, Accelerate.

Nothing here needs the code of the model. Torch, which takes seconds, is imported for a format that needs it:
``safetensors`` and ``huggingface`` do not.
"""
