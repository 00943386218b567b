"""The files of one start of a job that one node writes and looks after at one level."""

from collections.abc import Iterable
from dataclasses import dataclass

from lazysnap.grants.messages import StepKey
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.storage import Storage
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import NodeName, SnapshotName, parse_file_name
from lazysnap.topology import Team


@dataclass(frozen=True)
class NodeFiles:
    """Names files, and decides which are the node's. Pure, but for what takes a storage."""

    team: Team
    run_id: str
    start: str
    is_shared: bool
    """True if all nodes see the same place."""

    def directory(self, step: int) -> str:
        """The directory of a snapshot of this start."""
        return SnapshotName(self.run_id, step, self.start).directory

    @property
    def name(self) -> NodeName:
        """The name of the file that the node writes."""
        team = self.team
        if len(team.node_ranks) == 1:
            return NodeName(team.node_ranks[0], team.world_size)
        return NodeName(team.node, team.nodes)

    def found(self, storage: Storage, step: int) -> Manifest:
        """Read the manifest of the node's committed file. Blocks.

        Raises: FileNotFoundError, if it or a shard of its ranks is missing; ShardCorrupt; LevelUnavailable.
        """
        place = self.place(storage, step)
        manifest = place.read_manifest()
        if missing := set(self.team.node_ranks) - {shard.meta.rank for shard in manifest.shards}:
            raise FileNotFoundError(f"{place.where}: nothing of rank {min(missing)}")
        return manifest

    def place(self, storage: Storage, step: int) -> FilePlace:
        """The place of the node's file, written or not."""
        return FilePlace(storage, self.directory(step), self.name)

    def entry(self, url: str, speed: int, step: int) -> Entry:
        """The facts of the first shard of the node."""
        facts = (self.run_id, self.start, step, self.team.node_ranks[0], self.team.world_size)
        return Entry(url, speed, *facts, self.directory(step))

    def of_run(self, directories: Iterable[str]) -> dict[str, StepKey]:
        """Those directories that hold snapshots of this run, whichever start they are of."""
        found = {}
        for directory in directories:
            name = SnapshotName.parse(directory)
            if name is not None and name.run_id == self.run_id:
                found[directory] = StepKey(name.step, name.start)
        return found

    def mine(self, storage: Storage, directory: str, key: StepKey) -> list[FilePlace]:
        """The committed files in a directory that this node deletes when the snapshot goes.

        Of this start what it wrote, of earlier ones what is left to it. Blocks.
        """
        is_mine = self._is_own if key.start == self.start else self._is_left_to
        return [FilePlace(storage, directory, name) for name in _manifests(storage, directory) if is_mine(name)]

    def looks_after(self, name: NodeName) -> bool:
        """True if this node removes what dead writers left of files of that name."""
        return self._is_own(name) or self._is_left_to(name)

    def _is_own(self, name: NodeName) -> bool:
        return name == self.name

    def _is_left_to(self, name: NodeName) -> bool:
        """Share out files by number where all nodes see the same ones, so that each goes once.

        On a disk of its own a node finds files of whatever number it had when it wrote them.
        """
        return not self.is_shared or name.node % self.team.nodes == self.team.node


def _manifests(storage: Storage, directory: str) -> list[NodeName]:
    parsed = [found for found in map(parse_file_name, storage.list(directory)) if found is not None]
    return [name for name, suffix in parsed if suffix == "json"]
