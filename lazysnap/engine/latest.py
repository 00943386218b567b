"""The newest complete snapshot at a level, for those who want a path and no engine."""

import os
from typing import Any

from lazysnap.levels import open_store
from lazysnap.resolver import candidates


def latest_path(url: "str | os.PathLike[Any]") -> str | None:
    """The directory of the newest complete snapshot below ``url``, ``None`` if there is none.

    Blocks: lists the level and reads its manifests; no shard is read or verified.
    Raises: LevelUnavailable, if the level does not answer.
    """
    store = open_store(os.fspath(url))
    plans = candidates([store.inventory()])
    return f"{store.url}/{plans[0].sources[0][0].location}" if plans else None
