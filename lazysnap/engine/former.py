"""What ranks left in a keeper's memory that are no more, after a restart with fewer ranks.

The first rank of each node says that nobody will need it, once a snapshot of the present ranks can be resumed instead.
"""

from lazysnap.config import SnapshotConfig
from lazysnap.engine.durability import Durability
from lazysnap.engine.recorder import Recorder
from lazysnap.keeper.client import KeeperClient
from lazysnap.ranks.world import World


class FormerRanks:
    """Of one node; used on the training thread of its first rank."""

    def __init__(self, config: SnapshotConfig, client: KeeperClient, world: World) -> None:
        self._has_levels = bool(config.levels)
        self._client = client
        self._world = world
        self._is_over = not world.is_alone and world.place.local_rank != 0

    def dismiss(self, recorder: Recorder, durability: Durability, *, is_end: bool = False) -> None:
        """Tell the keeper, once, if a snapshot of this start is durable; without levels, if memory holds nothing older.

        ``is_end``: all ranks ended well, so memory goes. Does not block. Hot.
        """
        if self._is_over:
            return
        if durability.has(0) if self._has_levels else is_end or recorder.is_past_resumed():
            self._is_over = self._client.supersede(self._world.place.local_world_size)
