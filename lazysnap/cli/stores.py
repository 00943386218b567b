"""URLs and storage options on the command line, and the stores that they open."""

import argparse
import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any

from lazysnap.errors import ConfigError, FormatError, LevelError
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.store import SnapshotStore, open_store
from lazysnap.shard.names import SnapshotName

_MOST_LOOKED_AT = 64


def parse_option(text: str) -> tuple[str, Any]:
    """Parse ``KEY=VALUE``. The value is JSON if it is valid JSON, else text.

    Raises: argparse.ArgumentTypeError, without the value: it may be a secret.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def open_place(url: str, *options: Iterable[tuple[str, Any]] | None) -> SnapshotStore:
    """Return the store at a path or URL. Raises: LevelError, ConfigError."""
    chosen = {key: value for pairs in options for key, value in pairs or ()}
    if not url:
        raise ConfigError("an empty URL: name a directory or an fsspec URL")
    return open_store(url, options=chosen or None)


def open_existing(url: str, *options: Iterable[tuple[str, Any]] | None) -> SnapshotStore:
    """Like ``open_place``, for reading: a directory that does not exist is more likely misspelt than empty.

    Raises: also LevelError, if a local directory does not exist.
    """
    store = open_place(url, *options)
    if isinstance(store.storage, LocalStorage) and not os.path.isdir(store.url):
        what = "is not a directory" if os.path.exists(store.url) else "does not exist"
        raise LevelError(f"{store.url} {what}: name the directory of a level, which holds step-…")
    return store


def levels_near(store: SnapshotStore) -> list[str]:
    """Return levels in the directories of ``store``, or the level that it is part of: a hint, if it has no snapshots.

    Blocks: one listing per directory, of a few dozen at most. Raises nothing.
    """
    parent, _, name = store.url.rpartition("/")
    if SnapshotName.parse(name) is not None:
        return [parent]
    found = []
    with contextlib.suppress(LevelError, OSError, FormatError):
        for name in sorted(store.storage.list())[:_MOST_LOOKED_AT]:
            with contextlib.suppress(LevelError, OSError, FormatError):  # most likely a file
                if any(SnapshotName.parse(inner) is not None for inner in store.storage.list(name)):
                    found.append(f"{store.url}/{name}")
    return found
