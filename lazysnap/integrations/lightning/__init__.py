"""Lightning, as ``lightning.pytorch`` or ``pytorch_lightning``: the callback, and ``ckpt_path="latest"``."""

from lazysnap.integrations.lightning.framework import callback_bases

# Before any other import: what is missing is Lightning, not one of the packages that come with it.
callback_bases()

from lazysnap.integrations.lightning.callback import LazySnapshotCallback  # noqa: E402

__all__ = ["LazySnapshotCallback"]
