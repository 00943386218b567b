"""The callback's arguments as one ``SnapshotConfig``."""

import os
from dataclasses import replace
from typing import Any

from lazysnap.config import PersistentLevel, SnapshotConfig, resolve_url
from lazysnap.errors import ConfigError


def check_arguments(dirpath: Any, every_n_steps: int, config: SnapshotConfig | None) -> None:
    """Raises: ConfigError, if the shorthands are wrong or contradict ``config``."""
    if config is not None and not isinstance(config, SnapshotConfig):
        raise ConfigError(f"LazySnapshotCallback.config must be a SnapshotConfig, got {config!r}")
    checked = SnapshotConfig(every_n_steps=every_n_steps)
    url = None if dirpath is None else PersistentLevel(dirpath).url
    if config is None:
        return
    if url is not None and url not in [level.url for level in config.levels]:
        raise ConfigError(
            f"LazySnapshotCallback: dirpath={dirpath!r} contradicts config.levels, which names "
            f"{[level.url for level in config.levels] or 'no place'}; give the place in config.levels only"
        )
    if checked.every_n_steps not in (1, config.every_n_steps):
        raise ConfigError(
            f"LazySnapshotCallback: every_n_steps={every_n_steps} contradicts config.every_n_steps="
            f"{config.every_n_steps}; give it in config only"
        )


def default_url(trainer: Any) -> str:
    """Where snapshots go if nothing else is said; also what names the job then."""
    return resolve_url(os.path.join(str(trainer.default_root_dir), "lazysnap"))


def make_config(dirpath: Any, every_n_steps: int, config: SnapshotConfig | None, trainer: Any) -> SnapshotConfig:
    """``config`` as it is, or one persistent level at ``dirpath``."""
    if config is not None:
        return replace(config)
    level = PersistentLevel(dirpath if dirpath is not None else default_url(trainer))
    return SnapshotConfig(every_n_steps=every_n_steps, levels=(level,))
