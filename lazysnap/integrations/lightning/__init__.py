"""Lightning, as ``lightning.pytorch`` or ``pytorch_lightning``: the callback, and ``ckpt_path="latest"``."""

from lazysnap.integrations.lightning.framework import callback_bases

# Before any other import, so that an error names Lightning, and not one of its dependencies.
callback_bases()

from lazysnap.integrations.lightning.callback import LazySnapshotCallback  # noqa: E402

__all__ = ["LazySnapshotCallback"]
