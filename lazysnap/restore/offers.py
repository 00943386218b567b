"""Packs the shards that each rank has into few bytes for the other ranks at a restart. Pure.

Every rank receives what all ranks send. With thousands of ranks, a hundred bytes of each rank are hundreds of kilobytes
at every rank. So only keys of snapshots and ranges of ranks are sent, without data that the receiver already has: the
node of the sender, names of directories, URLs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lazysnap.keeper.questions import HeldMember, HeldParity
from lazysnap.levels.listing import Directory
from lazysnap.resolver import MEMORY, Entry, Inventory
from lazysnap.shard.names import NodeName


def ranges_of(numbers: Iterable[int]) -> list[int]:
    """Return the first and last number of each range of consecutive numbers, in one list."""
    ranges: list[int] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1] + 1:
            ranges[-1] = number
        else:
            ranges += [number, number]
    return ranges


def numbers_in(ranges: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of ``ranges_of``."""
    for first, last in zip(ranges[::2], ranges[1::2], strict=True):
        yield from range(first, last + 1)


# Memory


def pack_memory(inventories: Iterable[Inventory]) -> list[Any]:
    """Return the captures in the memory that one rank requested."""
    captures: dict[tuple[str, str, int, int, int], list[tuple[int, int, bool | None]]] = defaultdict(list)
    for inventory in inventories:
        for entry in inventory.entries:
            local_rank, sequence = entry.location
            key = (entry.run_id, entry.start, entry.world_size, entry.rank, local_rank)
            captures[key].append((entry.step, sequence, entry.is_repeatable))
    return [[*key, steps] for key, steps in captures.items()]


def unpack_memory(packed: Iterable[list[Any]], node: str) -> Inventory:
    """Unpack the result of ``pack_memory`` of a rank."""
    entries = []
    for run_id, start, world_size, rank, local_rank, steps in packed:
        for step, sequence, is_repeatable in steps:
            capture = (run_id, start, step, rank, world_size, (local_rank, sequence))
            entries.append(Entry(MEMORY, *capture, node=node, is_repeatable=is_repeatable))
    return Inventory(f"{MEMORY} of {node}", tuple(entries))


# Parity


def pack_parity(parities: Iterable[HeldParity]) -> list[Any]:
    """Pack the parity that one node holds, with each group only once."""
    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for parity in parities:
        ranks = []
        sizes = []
        for member in parity.members:
            ranks.append(tuple(ranges_of(member.ranks)))
            sizes.append(member.size_bytes)
        facts = (parity.parity, parity.most_lost, parity.block_bytes, parity.position)
        groups[parity.run_id, parity.start, parity.world_size, tuple(ranks), facts].append([parity.step, sizes])
    return [[*key, steps] for key, steps in groups.items()]


def unpack_parity(packed: Iterable[list[Any]]) -> list[HeldParity]:
    """Unpack the result of ``pack_parity``."""
    parities = []
    for run_id, start, world_size, ranges_of_members, facts, steps in packed:
        for step, sizes in steps:
            members = []
            for ranges, size_bytes in zip(ranges_of_members, sizes, strict=True):
                members.append(HeldMember(list(numbers_in(ranges)), size_bytes))
            parities.append(HeldParity(run_id, start, step, world_size, members, *facts))
    return parities


# Levels


def pack_files(inventory: Inventory, directories: Sequence[Directory]) -> list[Any]:
    """Pack the shards that one rank found in its share of the manifests at a level.

    Args:
        inventory: the result of the rank.
        directories: the directories that all ranks read together.
    """
    numbers = {directory.snapshot: number for number, directory in enumerate(directories)}
    ranks: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for entry in inventory.entries:
        ranks[numbers[entry.snapshot], entry.file, entry.world_size].append(entry.rank)
    # Usually the file of a node holds the same ranks in all directories.
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for (number, file, world_size), of_file in ranks.items():
        name = NodeName.parse(file)
        assert name is not None, "the manifest was read at that name"
        alike[name.node, name.nodes, world_size, tuple(ranges_of(of_file))].append(number)
    files = [[*key, ranges_of(of_key)] for key, of_key in alike.items()]
    return [files, list(inventory.problems)]


def unpack_files(
    packed: list[Any], directories: Sequence[Directory], url: str, distance: int, label: str | None
) -> Inventory:
    """Unpack the result of ``pack_files``.

    Args:
        packed: the result of one rank.
        directories: as for ``pack_files``.
        url: the level.
        distance: see ``Entry``.
        label: the place, if only some ranks see it.
    """
    files, problems = packed
    entries = []
    for node, nodes, world_size, ranges, of_directories in files:
        file = NodeName(node, nodes).text
        for number in numbers_in(of_directories):
            directory = directories[number]
            name = directory.snapshot
            for rank in numbers_in(ranges):
                shard = (name.run_id, name.start, name.step, rank, world_size)
                entries.append(Entry(url, *shard, node=label, names=directory.names, file=file, distance=distance))
    return Inventory(url, tuple(entries), tuple(problems))
