"""Names of the directories of snapshots that tests make."""

from lazysnap.shard.names import SnapshotName

RUN, START = "0" * 16, "1" * 16


def directory_of(step: int, run_id: str = RUN, start: str = START) -> str:
    """``step-…`` of a snapshot."""
    return SnapshotName(run_id, step, start).directory
