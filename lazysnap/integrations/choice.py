"""``"latest"`` and ``"run:<id>"`` where a framework expects a checkpoint of its own."""

import os
from typing import Any

from lazysnap.errors import ConfigError
from lazysnap.runs import RunChoice
from lazysnap.shard.names import SnapshotName

LATEST = "latest"


def means_snapshot(which: Any) -> bool:
    """Whether ``which`` means a snapshot, and not a checkpoint of the framework.

    Raises: ConfigError, for a bad ``"run:…"``.
    """
    return isinstance(which, str) and (which == LATEST or RunChoice.parse(which) is not None)


def check_path(which: Any, framework: str, how: str, export: str) -> None:
    """Raises: ConfigError, if ``which`` is the directory of a snapshot, which no framework can read.

    ``how``: what resumes the newest snapshot; ``export``: what makes a checkpoint of one, as arguments of the command.
    """
    text = str(os.fspath(which)) if isinstance(which, (str, os.PathLike)) else ""
    level, _, name = text.rstrip("/").rpartition("/")
    if SnapshotName.parse(name) is not None and not os.path.isfile(text):
        raise ConfigError(
            f"{text!r} is the directory of a lazysnap snapshot, not a checkpoint file of {framework}: {how} resumes "
            f"the newest snapshot; `lazysnap export {level or '.'} latest {export}` writes such a checkpoint; "
            "lazysnap.load_weights reads the weights alone"
        )
