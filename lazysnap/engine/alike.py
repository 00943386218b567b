"""What all ranks must be configured alike, as they count on each other for it: compared when the engine is made."""

from collections.abc import Sequence
from typing import Any

from lazysnap.config import SnapshotConfig
from lazysnap.errors import ConfigError

Settings = dict[str, Any]

_OF_LEVEL = ("every_n_steps", "keep_last", "keep_every_n_steps", "aggregate")


def common_settings(config: SnapshotConfig) -> Settings:
    """Which steps are captured, persisted and kept, by the names of the settings; plain JSON."""
    found: Settings = {"every_n_steps": config.every_n_steps, "averaging_period": config.averaging_period}
    for number, level in enumerate(config.levels):
        found |= {f"levels[{number}].{name}": getattr(level, name) for name in _OF_LEVEL}
    return found | {"number of levels": len(config.levels)}


def check_alike(told: Sequence[Settings]) -> None:
    """``told``: by every rank. Raises: ConfigError, naming what differs, and on which ranks first."""
    first = told[0]
    for rank, mine in enumerate(told):
        # The number of levels first: then it says enough.
        for name in ("number of levels", *first):
            if mine.get(name) != first[name]:
                raise ConfigError(
                    f"ranks 0 and {rank} have other settings: {name} is {first[name]!r} and {mine.get(name)!r}; give "
                    "all ranks the same ones, or no snapshot would be complete"
                )
