"""Computes which snapshots survive the loss of processes and nodes, from the state of a keeper."""

import pathlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lazysnap.cli.output import without_beginning
from lazysnap.keeper.questions import LevelFacts, NodeState
from lazysnap.resolver import MEMORY

OTHER_NODES = "memory of other nodes"
_MOST_OF_SOURCE = 20
"""Maximum characters of a URL within other text."""
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs")
"""File systems that are not on a disk of this node."""


@dataclass(frozen=True)
class RestartPoint:
    """The snapshot that a restart would resume. ``step`` is ``None`` if there is none."""

    step: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Survival:
    """The snapshots that survive one loss."""

    safe: RestartPoint = field(default_factory=RestartPoint)
    if_disks_stay: RestartPoint = field(default_factory=RestartPoint)
    """A newer snapshot, on disks of the lost nodes."""


def source_text(source: str, levels: Collection[str]) -> str:
    """Return a source as text. ``levels``: the URLs of the job; a single one is called storage."""
    if source == OTHER_NODES:
        return "other nodes"
    if set(levels) == {source}:
        return "storage"
    return without_beginning(source, _MOST_OF_SOURCE)


def survival(state: NodeState) -> dict[str, Survival]:
    """Return what survives the loss of the training process, of its keeper, of both, and of nodes. Pure."""
    stored = _newest([_stored_at(level) for level in state.levels])
    in_memory = RestartPoint(memory_step(state), MEMORY)
    if in_memory.step is None:
        in_memory = stored
    without_keeper = stored
    if any(rank.is_training for rank in state.ranks):
        without_keeper = in_memory  # the trainers hold the memory, too
    return {
        "process": Survival(in_memory),
        "keeper": Survival(without_keeper),
        "process_and_keeper": Survival(stored),
        "node": _without_nodes(state, stored, 1),
        "two_nodes": _without_nodes(state, stored, min(2, state.nodes)),
        "all_nodes": _without_nodes(state, stored, state.nodes),
    }


def memory_step(state: NodeState) -> int | None:
    """Return the newest step that all ranks of this node have whole in memory. Pure."""
    if state.common_step is not None or len(state.ranks) != 1:
        return state.common_step
    captures = state.ranks[0].captures
    if not captures:
        return None
    return captures[-1].step


def _without_nodes(state: NodeState, stored: RestartPoint, num_lost: int) -> Survival:
    places = [_stored_at(level) for level in state.levels if _is_elsewhere(level, state.nodes)]
    if num_lost <= state.may_lose and num_lost < state.nodes:
        places.append(RestartPoint(state.protected, OTHER_NODES))
    safe = _newest(places)
    if _newest([safe, stored]) is safe:
        return Survival(safe)
    return Survival(safe, stored)


def _stored_at(level: LevelFacts) -> RestartPoint:
    return RestartPoint(level.newest, level.url)


def _newest(candidates: Iterable[RestartPoint]) -> RestartPoint:
    """Return the snapshot with the greatest step; of equal steps the first."""
    newest = RestartPoint()
    for candidate in candidates:
        if candidate.step is not None and (newest.step is None or candidate.step > newest.step):
            newest = candidate
    return newest


def _is_elsewhere(level: LevelFacts, nodes: int) -> bool:
    """True if snapshots stored there survive this node. Does not access the place, which might not answer."""
    if urlsplit(level.url).scheme or (nodes > 1 and level.is_shared):
        return True
    mountinfo = pathlib.Path("/proc/self/mountinfo").read_text()
    return nodes == 1 and file_system_of(level.url, mountinfo) in _NETWORK


def file_system_of(path: str, mountinfo: str) -> str:
    """Return the type of the file system that holds a path, by the text of ``/proc/self/mountinfo``. Pure."""
    longest = -1
    file_system = ""
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        # The kernel writes spaces and other separators of a path as octal numbers: proc_pid_mountinfo(5).
        point = re.sub(r"\\([0-7]{3})", _character, mount.split()[4]).rstrip("/")
        if f"{path}/".startswith(f"{point}/") and len(point) >= longest:
            longest = len(point)
            file_system = source.split()[0]
    return file_system


def _character(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 8))
