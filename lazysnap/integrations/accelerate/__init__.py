"""Accelerate: ``LazyAccelerator``, and ``attach`` for an existing accelerator."""

from lazysnap.integrations.frameworks import require

require("LazyAccelerator", "Accelerate", "accelerate", "accelerate")

from lazysnap.integrations.accelerate.accelerator import LazyAccelerator, attach_accelerator  # noqa: E402

__all__ = ["LazyAccelerator", "attach_accelerator"]
