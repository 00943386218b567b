"""Lightning, as ``lightning.pytorch`` or ``pytorch_lightning``: the callback, and ``ckpt_path="latest"``."""

from lazysnap.integrations.lightning.callback import LazySnapshotCallback

__all__ = ["LazySnapshotCallback"]
