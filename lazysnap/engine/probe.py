"""Whether storage levels answer at all, before a training that requires them."""

import functools
from collections.abc import Callable, Sequence

from lazysnap.config import PersistentLevel
from lazysnap.errors import LevelUnavailable
from lazysnap.levels import open_store
from lazysnap.levels.redaction import shown
from lazysnap.levels.storage import probe
from lazysnap.levels.watchdog import Watchdog


def check_levels(levels: Sequence[PersistentLevel]) -> None:
    """Blocks: at most each level's ``timeout_s``. Raises: LevelUnavailable, naming every level that failed."""
    attempts = [(level, Watchdog(functools.partial(_probe, level), shown(level.url))) for level in levels]
    problems = []
    for level, attempt in attempts:
        try:
            attempt.result(level.timeout_s)
        except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
            problems.append(f"{shown(level.url)}: {type(error).__name__}: {error}")
    if problems:
        text = "; ".join(problems)
        raise LevelUnavailable(f'SnapshotConfig(require="storage"): no snapshot could be stored at {text}')


def _probe(level: PersistentLevel, beat: Callable[[], None]) -> None:
    probe(open_store(level.url, options=level.storage_options).storage, beat)
