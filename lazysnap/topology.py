"""The ranks of each node, and the share of the state that each rank captures. Pure: all ranks compute the same.

State that is the same on all ranks of a group is cut into contiguous shares of equal size, in the order of the state:
every rank captures one share, and together they hold exactly one copy (REFT, section 4: sharded snapshots).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The place where one rank runs."""

    rank: int
    node: str
    """Equal for ranks that share memory."""
    local_rank: int
    """Number among the ranks of the node, from 0."""
    local_world_size: int


def places(nodes: Sequence[str]) -> list[Place]:
    """Return the place of every rank, from the node of every rank (``nodes[rank]``)."""
    local_world_sizes = Counter(nodes)
    ranks_so_far = Counter[str]()
    all_places = []
    for rank, node in enumerate(nodes):
        all_places.append(Place(rank, node, ranks_so_far[node], local_world_sizes[node]))
        ranks_so_far[node] += 1
    return all_places


@dataclass(frozen=True)
class Rows:
    """Rows ``[start, stop)`` of one tensor along its first dimension; a tensor without dimensions is one row."""

    index: int
    start: int
    stop: int


def share(sizes: Sequence[tuple[int, int]], part: int, parts: int) -> list[Rows]:
    """Return the rows in share ``part`` of ``parts``, of tensors with ``(rows, bytes per row)``.

    The shares of all parts cover every row exactly once; their bytes differ by less than one row of the tensors at
    their ends. Tensors without bytes belong to part 0, so that their shape is kept.
    """
    total = sum(rows * row_bytes for rows, row_bytes in sizes)
    low = total * part // parts
    high = total * (part + 1) // parts
    all_rows = []
    tensor_start = 0
    for index, (rows, row_bytes) in enumerate(sizes):
        if rows * row_bytes == 0:
            if part == 0:
                all_rows.append(Rows(index, 0, rows))
            continue
        # The first byte of a row decides its share.
        start = min(rows, max(0, -(-(low - tensor_start) // row_bytes)))
        stop = min(rows, max(0, -(-(high - tensor_start) // row_bytes)))
        if start < stop:
            all_rows.append(Rows(index, start, stop))
        tensor_start += rows * row_bytes
    return all_rows
