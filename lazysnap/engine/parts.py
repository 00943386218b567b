"""The parts that the objects of one engine share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lazysnap.config import SnapshotConfig
from lazysnap.engine.level_checks import shared_levels
from lazysnap.engine.messages import Messages
from lazysnap.engine.recorder import Recorder
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.ranks.checks import check_places
from lazysnap.ranks.discovery import Discovery, discover_keepers
from lazysnap.ranks.world import World
from lazysnap.state.objects import ObjectState
from lazysnap.state.source import StateSource


@dataclass(frozen=True)
class Parts:
    """Made once per engine."""

    config: SnapshotConfig
    source: StateSource
    identity: JobIdentity
    world: World
    client: KeeperClient
    messages: Messages
    recorder: Recorder
    discovery: Discovery
    """The addresses of other nodes."""
    shared: list[str]
    """Levels that are one place for all nodes."""

    @classmethod
    def of(cls, config: SnapshotConfig, source: StateSource, identity: JobIdentity) -> "Parts":
        """Make the parts; no keeper is started. Collective. Blocks: for other ranks.

        Raises: ConfigError; WaitTimeout.
        """
        world = World(config.collective_timeout_s, source.optimizers())
        client = KeeperClient(
            identity, world.place.local_rank, linger_s=config.memory.linger_s, io_timeout_s=config.io_timeout_s
        )
        messages = Messages(Statistics(), is_first=world.rank == 0, speaks_for_node=world.place.local_rank == 0)
        recorder = Recorder(config, source, client, messages, world)
        check_places(world, config, identity.job_id)
        discovery = discover_keepers(world, client, config, identity.job_id)
        recorder.use_redundancy(discovery.group)
        shared = shared_levels(world, config.levels)
        return cls(config, source, identity, world, client, messages, recorder, discovery, shared)

    @property
    def statistics(self) -> Statistics:
        """Counters and timings; updated in place."""
        return self.messages.statistics


def source_of(state: StateSource | Mapping[str, Any]) -> StateSource:
    """Return the state as a source. Raises: ConfigError, if it is none."""
    source = ObjectState(state) if isinstance(state, Mapping) and state else state
    if not isinstance(source, StateSource):
        raise ConfigError(
            'SnapshotEngine: the state must be a dict of names to objects, as in {"model": model, "optimizer": '
            f"optimizer}}, or a StateSource; got {'an empty one' if state == {} else type(state).__qualname__}"
        )
    return source
