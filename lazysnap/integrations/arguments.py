"""Arguments of the integrations: combines place and intervals into a ``SnapshotConfig``, and checks paths of
snapshots.
"""

import os
from dataclasses import dataclass
from typing import Any

from lazysnap.config import CAPTURE_EVERY_N_STEPS, KeepBest, PersistentLevel, SnapshotConfig, resolve_url
from lazysnap.errors import ConfigError
from lazysnap.shard.names import SnapshotName


def place_beside(directory: object, name: str = "lazysnap") -> str:
    """Return the default place for snapshots of a training that writes to ``directory``. It also names the job."""
    return resolve_url(os.path.join(str(directory), name))


@dataclass(frozen=True)
class Arguments:
    """Arguments of an integration. Raises: ConfigError, for wrong or contradictory values."""

    owner: str
    """The class of the integration, for messages."""
    dirpath: "str | os.PathLike[str] | None" = None
    every_n_steps: int | None = None
    persist_every_n_steps: int | None = None
    config: SnapshotConfig | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        config = self.config
        if config is not None and not isinstance(config, SnapshotConfig):
            raise ConfigError(f"{self.owner}.config must be a SnapshotConfig, got {type(config).__name__}")
        if self.keep_best is not None and not isinstance(self.keep_best, KeepBest):
            raise ConfigError(
                f'{self.owner}.keep_best must be KeepBest("val_loss", ...) or None, got {self.keep_best!r}'
            )
        try:
            short_form = self._short_form(".")
        except ConfigError as error:
            text = str(error).replace("PersistentLevel.every_n_steps", f"{self.owner}.persist_every_n_steps")
            raise ConfigError(text) from error
        if config is not None:
            self._check_beside(config, short_form.levels[0].url)

    def _short_form(self, default_url: str) -> SnapshotConfig:
        """Return the config for the arguments besides ``config``. Raises: ConfigError."""
        every_n_steps = self.every_n_steps
        if every_n_steps is None:
            every_n_steps = CAPTURE_EVERY_N_STEPS
        place = self.dirpath
        if place is None:
            place = default_url
        level = PersistentLevel(place, every_n_steps=self.persist_every_n_steps)
        return SnapshotConfig(every_n_steps=every_n_steps, levels=(level,))

    def _check_beside(self, config: SnapshotConfig, url: str) -> None:
        """Raises: ConfigError, if an argument contradicts ``config``."""
        urls = [level.url for level in config.levels]
        if self.dirpath is not None and url not in urls:
            raise ConfigError(
                f"{self.owner}: dirpath={self.dirpath!r} contradicts config.levels, which names "
                f"{urls or 'no place'}; give the place in config.levels only"
            )
        if self.every_n_steps is not None and self.every_n_steps != config.every_n_steps:
            raise ConfigError(
                f"{self.owner}: every_n_steps={self.every_n_steps} contradicts config.every_n_steps="
                f"{config.every_n_steps}; give it in config only"
            )
        intervals = [level.every_n_steps for level in config.levels]
        if self.persist_every_n_steps is not None and set(intervals) != {self.persist_every_n_steps}:
            raise ConfigError(
                f"{self.owner}: persist_every_n_steps={self.persist_every_n_steps} contradicts config.levels, "
                f"where every_n_steps is {intervals or 'not set'}; give it there only, as "
                "PersistentLevel(..., every_n_steps=...)"
            )

    def config_for(self, default_url: str) -> SnapshotConfig:
        """Return ``config``, or one persistent level at ``dirpath``."""
        if self.config is not None:
            return self.config
        return self._short_form(default_url)

    def named_config(self, default_url: str | None) -> SnapshotConfig | None:
        """Return ``config_for(default_url)``; ``None`` if no place is known yet."""
        if default_url is None and self.config is None and self.dirpath is None:
            return None
        return self.config_for(default_url or "")


def check_path(which: Any, framework: str, how: str, export: str, exported: str = "such a checkpoint") -> None:
    """Refuse the directory of a snapshot, which frameworks cannot read.

    Args:
        which: the checkpoint that the program named.
        framework: the name of the framework.
        how: the argument that resumes the newest snapshot.
        export: the arguments of ``lazysnap export`` for this framework.
        exported: the result of this export.

    Raises: ConfigError.
    """
    text = ""
    if isinstance(which, (str, os.PathLike)):
        text = str(os.fspath(which))
    level, _, name = text.rstrip("/").rpartition("/")
    if SnapshotName.parse(name) is not None and not os.path.isfile(text):
        raise ConfigError(
            f"{text!r} is the directory of a lazysnap snapshot, not a checkpoint file of {framework}: {how} resumes "
            f"the newest snapshot; `lazysnap export {level or '.'} latest {export}` writes {exported}; "
            "lazysnap.load_weights reads the weights alone"
        )
