"""Which shards can be computed from what other nodes hold: those that are lost, and those that may be damaged. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lazysnap.keeper.questions import HeldParity
from lazysnap.parity.groups import Group
from lazysnap.parity.pieces import Pieces, can_rebuild
from lazysnap.resolver import Entry, SnapshotKey

PARITY = "parity"
"""The level of what is computed from parity, in place of an URL."""


@dataclass(frozen=True)
class LostPart:
    """The part of a node that is gone, or whose memory is, or may turn out to be damaged (``keeper.node_part``)."""

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
    entries: Iterable[Entry], held: Sequence[tuple[str, HeldParity]]
) -> tuple[list[LostPart], list[Entry], list[str]]:
    """Return the parts that can be computed, lost or not, an entry for each of their shards, and problems.

    The ``location`` of an entry begins with the number of its part. A problem says why a lost part cannot be computed.

    ``entries``: of memory; ``held``: parity, and the node that holds it. The same on all ranks.
    """
    nodes: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for entry in entries:
        if entry.node is not None:
            nodes[entry.start, entry.step, entry.rank].add(entry.node)
    groups: dict[tuple[object, ...], list[tuple[str, HeldParity]]] = defaultdict(list)
    for node, parity in held:
        members = tuple((*member.ranks, member.size_bytes) for member in parity.members)
        groups[parity.start, parity.step, parity.parity, parity.most_lost, parity.block_bytes, members].append(
            (node, parity)
        )
    parts: list[LostPart] = []
    found: list[Entry] = []
    problems = []
    for holders in groups.values():
        first = holders[0][1]
        group = Group(tuple(range(len(first.members))), first.parity)
        pieces = Pieces(group, tuple(member.size_bytes for member in first.members), first.block_bytes)
        there: dict[int, str] = {}
        for position, member in enumerate(first.members):
            common = set.intersection(*(nodes[first.start, first.step, rank] for rank in member.ranks))
            if common:
                there[position] = min(common)
        parities = {parity.position: node for node, parity in holders}
        num_lost = len(first.members) - len(there)
        if num_lost and not can_rebuild(group, list(there), list(parities)):
            problems.append(
                f"step {first.step} in memory: {num_lost} of {len(first.members)} nodes of a group are lost, parity "
                f"replaces {first.parity}, of which {len(parities)} holders are left"
            )
            continue
        for position, member in enumerate(first.members):
            others = {other: node for other, node in there.items() if other != position}
            if not can_rebuild(group, list(others), list(parities)):
                continue
            where = f"{len(parts)}/"
            parts.append(LostPart(first.start, first.step, first.most_lost, pieces, position, others, parities))
            for rank in member.ranks:
                location = f"{where}{rank}"
                found.append(Entry(PARITY, 1, first.run_id, first.start, first.step, rank, first.world_size, location))
    return parts, found, problems


def most_protected(held: Sequence[tuple[str, HeldParity]]) -> SnapshotKey | None:
    """The snapshot of which the most nodes hold parity; of several the newest. ``held``: as of ``lost_parts``."""
    holders: dict[SnapshotKey, set[str]] = defaultdict(set)
    for node, parity in held:
        holders[SnapshotKey(parity.run_id, parity.step, parity.start, parity.world_size)].add(node)
    return max(holders, key=lambda key: (len(holders[key]), key), default=None)
