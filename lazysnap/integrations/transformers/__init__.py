"""The ``Trainer`` of Transformers: a callback, and ``resume_from_checkpoint="latest"``."""

from lazysnap.integrations.frameworks import require

require("LazyTrainerCallback", "Transformers", "transformers", "transformers")

from lazysnap.integrations.transformers.callback import LazyTrainerCallback, attach_trainer  # noqa: E402

__all__ = ["LazyTrainerCallback", "attach_trainer"]
