"""Finds the shards that can be computed from other nodes: lost ones, and ones that may be damaged. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lazysnap.keeper.questions import HeldParity
from lazysnap.parity.groups import Group, Pieces, can_rebuild
from lazysnap.resolver import PARITY, Entry, SnapshotKey

_DISTANCE = 1
"""See ``Entry``: parity comes after memory and before the levels."""


@dataclass(frozen=True)
class LostPart:
    """The part of a node (``keeper.node_part``) that is lost, or whose memory is lost or may be damaged."""

    start: str
    step: int
    most_lost: int
    """See ``HeldParity``."""
    pieces: Pieces
    position: int
    """The position of the lost node."""
    parts: dict[int, str]
    """The node that holds the captures of each other member, by position."""
    parities: dict[int, str]
    """The node that holds the parity of each member, by position."""


def lost_parts(
    entries: Iterable[Entry], parities: Sequence[tuple[str, HeldParity]]
) -> tuple[list[LostPart], list[Entry], list[str]]:
    """Return the parts that can be computed, lost or not, an entry for each of their shards, and problems.

    The ``location`` of an entry is the number of its part. A problem is the reason why a lost part cannot be computed.
    The result is the same on all ranks.

    Args:
        entries: the captures in memory.
        parities: the parity in memory, each with the node that holds it.
    """
    nodes = _nodes_of_captures(entries)
    parts: list[LostPart] = []
    shards: list[Entry] = []
    problems = []
    for holders in _groups_of(parities):
        first = holders[0][1]
        group = Group(tuple(range(len(first.members))), first.parity)
        pieces = Pieces(group, tuple(member.size_bytes for member in first.members), first.block_bytes)
        present = _present_parts(first, nodes)
        parity_nodes = {parity.position: node for node, parity in holders}
        num_lost = len(first.members) - len(present)
        if num_lost and not can_rebuild(group, list(present), list(parity_nodes)):
            problems.append(
                f"step {first.step} in memory: {num_lost} of {len(first.members)} nodes of a group are lost or out of "
                f"reach, parity replaces {first.parity}, and {len(parity_nodes)} holders of it are within reach"
            )
            continue
        for position, member in enumerate(first.members):
            other_nodes = present.copy()
            other_nodes.pop(position, None)
            if not can_rebuild(group, list(other_nodes), list(parity_nodes)):
                continue
            number = len(parts)
            parts.append(
                LostPart(first.start, first.step, first.most_lost, pieces, position, other_nodes, parity_nodes)
            )
            for rank in member.ranks:
                capture = (first.run_id, first.start, first.step, rank, first.world_size)
                shards.append(Entry(PARITY, *capture, (number,), distance=_DISTANCE))
    return parts, shards, problems


def _nodes_of_captures(entries: Iterable[Entry]) -> dict[tuple[str, int, int], set[str]]:
    """Return the nodes that hold each capture, by start, step and rank."""
    nodes: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for entry in entries:
        if entry.node is not None:
            nodes[entry.start, entry.step, entry.rank].add(entry.node)
    return nodes


def _groups_of(parities: Sequence[tuple[str, HeldParity]]) -> list[list[tuple[str, HeldParity]]]:
    """Group parity by members and snapshot."""
    groups: dict[tuple[object, ...], list[tuple[str, HeldParity]]] = defaultdict(list)
    for node, parity in parities:
        members = tuple((*member.ranks, member.size_bytes) for member in parity.members)
        key = (parity.start, parity.step, parity.parity, parity.most_lost, parity.block_bytes, members)
        groups[key].append((node, parity))
    return list(groups.values())


def _present_parts(parity: HeldParity, nodes: dict[tuple[str, int, int], set[str]]) -> dict[int, str]:
    """Return a node that holds the captures of all ranks of a member, by the member's position."""
    present = {}
    for position, member in enumerate(parity.members):
        common = set.intersection(*(nodes.get((parity.start, parity.step, rank), set()) for rank in member.ranks))
        if common:
            present[position] = min(common)
    return present


def protected_snapshots(parities: Sequence[tuple[str, HeldParity]]) -> frozenset[SnapshotKey]:
    """Return the snapshots of which any node holds parity. ``parities``: see ``lost_parts``."""
    keys = set()
    for _, parity in parities:
        keys.add(SnapshotKey(parity.run_id, parity.step, parity.start, parity.world_size))
    return frozenset(keys)
