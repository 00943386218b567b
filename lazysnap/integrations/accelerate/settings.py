"""What ``snapshots=`` means, and which accelerators cannot be captured."""

import os
from typing import Any

from lazysnap.config import SnapshotConfig, config_at, resolve_url
from lazysnap.errors import ConfigError

Snapshots = str | os.PathLike[str] | SnapshotConfig | None

_STOCK = {
    "XLA": "its tensors are evaluated lazily on another device",
    "MEGATRON_LM": "Megatron-LM keeps the training state in objects of its own",
}


def default_url(accelerator: Any) -> str | None:
    """Where snapshots go if nothing else is said; also what names the job then. ``None``, if there is no such place."""
    if accelerator.project_dir is None:
        return None
    return resolve_url(os.path.join(str(accelerator.project_dir), "lazysnap"))


def config_of(snapshots: Snapshots, accelerator: Any) -> SnapshotConfig:
    """``snapshots`` as settings: one level at a path or URL, by default at ``<project_dir>/lazysnap``.

    Raises: ConfigError, if there is no place, or for what names none.
    """
    place = default_url(accelerator) if snapshots is None else snapshots
    if place is None:
        raise ConfigError(
            "LazyAccelerator: there is no place for snapshots: give project_dir=..., or snapshots= a path, a URL or a "
            "SnapshotConfig"
        )
    return config_at(place)


def why_stock(accelerator: Any) -> str | None:
    """Why this accelerator saves and loads as Accelerate does, without snapshots; ``None`` if it does not.

    Raises: ConfigError, for DeepSpeed and FSDP 1.
    """
    kind = accelerator.distributed_type.name
    if kind == "DEEPSPEED":
        raise ConfigError(
            "LazyAccelerator: DeepSpeed cannot be captured: each process holds a part of weights and optimizer state "
            "that no state_dict() tells of. Use FSDP2 (fsdp_version: 2) or DDP, or stock accelerate.Accelerator"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ConfigError(
            "LazyAccelerator: FSDP 1 cannot be captured: its parameters are pieces of one flat tensor. Set "
            "fsdp_version: 2, or use stock accelerate.Accelerator"
        )
    return _STOCK.get(kind)
