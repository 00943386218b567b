"""The metadata of a capture: written into the slot first, and later the body of the manifest."""

import importlib.metadata
import time
from dataclasses import dataclass, field
from typing import Any

from lazysnap.capture.plan import CapturePlan, storage_of
from lazysnap.config import SnapshotConfig
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.ranks.checks import check_alike, common_settings
from lazysnap.ranks.world import World
from lazysnap.restore.level import newest_id
from lazysnap.shard.manifest import json_text
from lazysnap.shard.names import id_after, new_id
from lazysnap.state.source import StateSource
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
    parameters: dict[str, list[str]] | None = None
    """See ``names_of_parameters``."""
    _packages: dict[str, str] = field(default_factory=package_versions, repr=False)
    _written: tuple[dict[str, list[str]], str] | None = field(default=None, init=False, repr=False)
    """The last argument and result of ``_parameters_text``."""

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
        # The parts that grow with the number of tensors are encoded already: plan, optimizers, walk.
        text = f'{json_text(fields)[:-1]},{plan.facts_text},{self._parameters_text()}"state":{walked.text}}}'
        return text.encode("utf-8", "surrogatepass")

    def _parameters_text(self) -> str:
        """Return the field ``parameters`` with a comma; empty if there is none."""
        if self.parameters is None:
            return ""
        if self._written is None or self._written[0] is not self.parameters:
            self._written = self.parameters, f'"parameters":{json_text(self.parameters)},'
        return self._written[1]


def names_of_parameters(source: StateSource, everything: Walk, messages: Messages) -> dict[str, list[str]] | None:
    """Return the names of each optimizer's parameters, in its order, by the optimizer's path in the state.

    An optimizer's own state only has numbers for parameters.

    Optimizers of which one parameter has no name are skipped. Warns of parameters whose values are in no part of the
    state.
    """
    names = source.parameter_names()
    optimizers = source.optimizer_parameters()
    listed = {}
    for path, parameters in optimizers.items():
        listed[path] = [names.get(id(parameter), "") for parameter in parameters]
    complete = {path: listed_names for path, listed_names in listed.items() if all(listed_names)}
    if len(complete) < len(listed):
        captured = {storage_of(tensor) for tensor in everything.tensors}
        for path, listed_names in listed.items():
            num_missing = 0
            for name, parameter in zip(listed_names, optimizers[path], strict=True):
                if not name and parameter.numel() > 0 and storage_of(parameter) not in captured:
                    num_missing += 1
            if num_missing:
                messages.tell(MessageKind.VALUES_MISSING, count=num_missing, path=path)
    return complete or None
