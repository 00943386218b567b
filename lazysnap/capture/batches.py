"""Runs of small tensors in CPU memory that are copied into the image with one system call."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazysnap.capture.plan import TensorRecord

SMALL_BYTES = 64 << 10
"""Larger tensors are copied one by one, because the cost of a call is negligible for them."""
_MOST_BYTES = 1 << 20
"""Maximum bytes of a batch. A cancelled copy can stop between two batches."""
_MOST_MEMBERS = 1024
"""Tensors of a batch: the limit of one ``pwritev``."""


@dataclass(frozen=True)
class Batch:
    """Tensors that are adjacent in the image."""

    members: tuple[int, ...]
    """Indices of their records, in file order."""
    start: int
    end: int
    """The tensors are the bytes ``[start, end)`` of the image."""
    pieces: "array[int]"
    """Address and length of each tensor, when the plan was made."""

    def pieces_at(self, addresses: "array[int]") -> "array[int]":
        """Return the pieces for tensors that have moved to other addresses."""
        pieces = array("Q", self.pieces)
        pieces[0::2] = addresses
        return pieces


def batches_of(records: Sequence["TensorRecord"], chosen: Sequence[int]) -> list[Batch]:
    """Return batches of the ``chosen`` records, which are in file order; every record is in one of them.

    A large tensor, or a tensor whose bytes in memory differ from the file, is a separate batch.
    """
    batches: list[Batch] = []
    members: list[int] = []
    for index in chosen:
        if members and not _joins(records, members, index):
            batches.append(_batch(records, members))
            members = []
        members.append(index)
    if members:
        batches.append(_batch(records, members))
    return batches


def _joins(records: Sequence["TensorRecord"], members: Sequence[int], index: int) -> bool:
    """True if a record can be copied together with those before it."""
    first = records[members[0]]
    last = records[members[-1]]
    record = records[index]
    if not (_is_simple(last) and _is_simple(record)):
        return False
    is_next = last.offset + last.nbytes == record.offset
    has_room = record.offset + record.nbytes - first.offset <= _MOST_BYTES and len(members) < _MOST_MEMBERS
    return is_next and has_room


def _is_simple(record: "TensorRecord") -> bool:
    return record.is_dense and record.nbytes <= SMALL_BYTES


def _batch(records: Sequence["TensorRecord"], members: Sequence[int]) -> Batch:
    pieces = array("Q")
    for index in members:
        pieces.append(records[index].pointer)
        pieces.append(records[index].nbytes)
    last = records[members[-1]]
    return Batch(tuple(members), records[members[0]].offset, last.offset + last.nbytes, pieces)
