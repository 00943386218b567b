"""The metadata of a capture: written into the slot first, and later the body of the manifest."""

import importlib.metadata
import time
from dataclasses import dataclass, field
from typing import Any

from lazysnap.capture.plan import CapturePlan
from lazysnap.config import SnapshotConfig
from lazysnap.ranks.checks import check_alike, common_settings
from lazysnap.ranks.world import World
from lazysnap.restore.level import newest_id
from lazysnap.shard.manifest import json_text
from lazysnap.shard.names import id_after, new_id
from lazysnap.state.walk import Walk

_LISTING_S = 3.0
"""Seconds that a start waits for the names at its levels."""
_PACKAGES = ("lazysnap", "torch", "lightning", "pytorch-lightning", "accelerate", "transformers")


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that made the state. Blocks: reads their metadata."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass
class MetaWriter:
    """Writes the metadata of the captures of one run. ``CaptureMeta`` defines the keys."""

    run_id: str
    start: str
    rank: int
    world_size: int
    newest: str = ""
    """The greatest id at the levels at that time; empty if there was none."""
    _packages: dict[str, str] = field(default_factory=package_versions, repr=False)

    @classmethod
    def agreed(cls, world: World, config: SnapshotConfig) -> "MetaWriter":
        """Return a writer for a new run, with the same ids on all ranks. Collective.

        Both ids are greater than those at the levels, even if a clock was set back: "latest" means the run with the
        greatest id. Blocks: for other ranks, and at most ``_LISTING_S`` for the names at the levels.
        Raises: ConfigError, if ranks are configured differently.
        """

        def describe() -> list[Any]:
            newest = ""
            if world.place.local_rank == 0:
                newest = newest_id(config.levels, _LISTING_S)
            return [common_settings(config), new_id(), new_id(), newest]

        answers = world.exchange_after("making the engine", describe)
        settings = []
        newest = ""
        for settings_of_rank, _, _, newest_of_rank in answers:
            settings.append(settings_of_rank)
            newest = max(newest, newest_of_rank)
        check_alike(settings)
        _, run_id, start, _ = answers[0]
        if newest:
            run_id = id_after(run_id, newest)
            start = id_after(start, newest)
        return cls(run_id, start, world.rank, world.size, newest)

    def rename(self, run_id: str) -> None:
        """Set the id of the new run to ``run_id``, or to a greater one. The same on all ranks."""
        if self.newest:
            run_id = id_after(run_id, self.newest)
        self.run_id = run_id

    def begin_after(self, newest_run: str) -> None:
        """Begin a run with a greater id than ``newest_run``. The same on all ranks."""
        self.run_id = id_after(self.run_id, newest_run)

    def follow(self, newest: str | None) -> None:
        """Begin another start, later than this one and ``newest``, so that repeated steps are other snapshots. The same
        on all ranks.
        """
        self.start = id_after(self.start, max(self.start, newest or ""))

    @property
    def start_number(self) -> int:
        """The id of the start in slots and keepers."""
        return int(self.start, 16)

    def write(self, step: int, plan: CapturePlan, walked: Walk) -> bytes:
        """Return the metadata of the capture of ``walked`` at ``step``. Hot."""
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "start": self.start,
            "step": step,
            "rank": self.rank,
            "world_size": self.world_size,
            "captured_ns": time.time_ns(),
            "packages": self._packages,
        }
        # The parts that grow with the number of tensors are encoded already.
        text = f'{json_text(fields)[:-1]},{plan.facts_text},"state":{walked.text}}}'
        return text.encode("utf-8", "surrogatepass")
