"""URLs, options and names on the command line, and the stores and snapshots that they mean."""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from lazysnap.errors import ConfigError, LevelUnavailable, SnapshotNotFound
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.store import SnapshotStore, open_store
from lazysnap.resolver import Inventory, RestartPlan, candidates

LATEST = "latest"
_LEAST_SECRET = 4
"""Shorter values are no secrets, and would be found everywhere."""


def parse_option(text: str) -> tuple[str, Any]:
    """``KEY=VALUE``; the value is JSON if it is valid JSON, else text.

    Raises: argparse.ArgumentTypeError, which does not tell the value.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def secrets(urls: Iterable[str], options: Iterable[tuple[str, Any]]) -> set[str]:
    """What must not be shown: passwords in URLs, and every text among the values of options."""
    found = {text for _, value in options for text in _texts(value)}
    for url in urls:
        try:
            found.add(urlsplit(url).password or "")
        except ValueError:
            continue  # whoever opens it says what is wrong with it
    return {text for text in found if len(text) >= _LEAST_SECRET}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)


def open_place(url: str, *options: Iterable[tuple[str, Any]] | None) -> SnapshotStore:
    """The store at a path or URL. Raises: LevelUnavailable, ConfigError."""
    chosen = {key: value for pairs in options for key, value in pairs or ()}
    if not url:
        raise ConfigError("an empty URL: name a directory or an fsspec URL")
    try:
        return open_store(url, options=chosen or None)
    except (TypeError, AttributeError) as error:
        # Drivers are classes of others: what they do with options that they do not know is their own.
        raise LevelUnavailable(f"{url}: the file system refuses its options {sorted(chosen)}: {error}") from error


def open_existing(url: str, *options: Iterable[tuple[str, Any]] | None) -> SnapshotStore:
    """As ``open_place``, for looking: a directory that is not there is more likely misspelt than empty.

    Raises: also LevelUnavailable, if a local directory does not exist.
    """
    store = open_place(url, *options)
    if isinstance(store.storage, LocalStorage) and not os.path.isdir(store.url):
        what = "is not a directory" if os.path.exists(store.url) else "does not exist"
        raise LevelUnavailable(f"{store.url} {what}: name the directory of a level, which holds step-…")
    return store


def find(inventory: Inventory, wanted: str, run: str | None = None) -> RestartPlan:
    """The snapshot that ``STEP``, ``NAME`` or ``latest`` means: of the newest run that has it, or of ``run``.

    Raises: SnapshotNotFound.
    """
    plans = [plan for plan in _meant(inventory, wanted) if plan.run_id.startswith(run or "")]
    if plans:
        return plans[0]
    there = sorted({plan.step for plan in candidates([inventory])})
    some = f"; complete are the steps {_few(there)}" if there else "; nothing there is complete"
    more = "".join(f"\n{problem}" for problem in inventory.problems)
    of_run = f" of run {run}" if run else ""
    raise SnapshotNotFound(f"{inventory.level}: no complete snapshot {wanted!r}{of_run}{some}{more}")


def _meant(inventory: Inventory, wanted: str) -> list[RestartPlan]:
    if wanted == LATEST:
        return candidates([inventory])
    # A name may consist of digits; a step cannot be a name.
    by_step = candidates([inventory], step=int(wanted)) if wanted.isascii() and wanted.isdigit() else []
    return by_step or candidates([inventory], name=wanted)


def _few(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-8:]))
    return shown if len(steps) <= 8 else f"…, {shown}"
