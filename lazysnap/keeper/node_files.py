"""The files of one start of a job that one node writes and looks after."""

from collections.abc import Iterable
from dataclasses import dataclass

from lazysnap.keeper.grant_messages import SnapshotKey
from lazysnap.keeper.team import Team
from lazysnap.levels.shards import ShardPlace
from lazysnap.levels.storage import Storage
from lazysnap.resolver import Entry
from lazysnap.shard.names import ShardName, SnapshotName, parse_file_name


@dataclass(frozen=True)
class NodeFiles:
    """Names files, and tells which are the node's. Pure, but for what takes a storage."""

    team: Team
    run_id: str
    start: str

    def directory(self, step: int) -> str:
        """Of a snapshot of this start."""
        return SnapshotName(self.run_id, step, self.start).directory

    def places(self, storage: Storage, step: int) -> list[ShardPlace]:
        """Where the shards of the node's ranks are, or will be, in their order."""
        world_size = self.team.world_size
        return [ShardPlace(storage, self.directory(step), ShardName(rank, world_size)) for rank in self.team.crew]

    def entry(self, url: str, speed: int, step: int) -> Entry:
        """What the first shard of the node offers."""
        facts = (self.run_id, self.start, step, self.team.crew[0], self.team.world_size)
        return Entry(url, speed, *facts, self.directory(step))

    def of_run(self, directories: Iterable[str]) -> dict[str, SnapshotKey]:
        """Those directories that hold snapshots of this run, whichever start they are of."""
        found = {}
        for directory in directories:
            name = SnapshotName.parse(directory)
            if name is not None and name.run_id == self.run_id:
                found[directory] = SnapshotKey(name.step, name.start)
        return found

    def mine(self, storage: Storage, directory: str, key: SnapshotKey) -> list[ShardPlace]:
        """The committed shards in a directory that this node deletes when the snapshot goes.

        Of this start what it wrote; those of earlier starts are shared out by rank, so that each goes once. Blocks.
        """
        found = []
        for name in storage.list(directory):
            parsed = parse_file_name(name)
            if parsed is not None and parsed[1] == "json" and self._is_mine(parsed[0], key):
                found.append(ShardPlace(storage, directory, parsed[0]))
        return found

    def _is_mine(self, shard: ShardName, key: SnapshotKey) -> bool:
        if key.start == self.start:
            return shard.world_size == self.team.world_size and shard.rank in self.team.crew
        return shard.rank % self.team.nodes == self.team.node
