"""``attach``: snapshots for an object of a framework that somebody else made."""

import os
from typing import Any

from lazysnap.config import SnapshotConfig
from lazysnap.errors import ConfigError


def attach(target: Any, snapshots: "str | os.PathLike[str] | SnapshotConfig | None" = None) -> Any:
    """Give ``target`` snapshots, in place, and return it.

    An ``accelerate.Accelerator`` has then what a ``LazyAccelerator`` has; a ``transformers.Trainer`` (those of TRL are,
    too) takes snapshots and understands ``"latest"``, see ``LazyTrainerCallback``. ``snapshots``: a path or URL, or a
    ``SnapshotConfig``; default ``<project_dir>/lazysnap`` or ``<output_dir>/lazysnap``. Idempotent.
    Raises: ConfigError, for anything else, and as ``LazyAccelerator`` and ``LazyTrainerCallback``.
    """
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(target).__mro__}
    if "accelerate.Accelerator" in names:
        from lazysnap.integrations.accelerate import attach_accelerator

        return attach_accelerator(target, snapshots)
    if "transformers.Trainer" in names:
        from lazysnap.integrations.transformers import attach_trainer

        attach_trainer(target, snapshots)
        return target
    raise ConfigError(
        f"attach: an accelerate.Accelerator or a transformers.Trainer is needed, got {type(target).__qualname__}; for "
        "Lightning use LazySnapshotCallback, for a plain loop SnapshotEngine"
    )
