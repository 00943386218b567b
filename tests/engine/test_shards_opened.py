"""A rank opens few shards of other ranks at a restart, wherever its rows are, and keeps few files open."""

import contextlib
import os

from support.catalogue import inventory_of
from support.names import START
from support.snapshots import Snapshot

from lazysnap import PersistentLevel
from lazysnap.levels.blocks import MemoryBlocks, WantedBytes
from lazysnap.levels.local import LocalStorage
from lazysnap.resolver import Entry
from lazysnap.restore import level
from lazysnap.restore.part import complete, nearest_first
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.assembly import Assembly, whole_box
from lazysnap.snapshots.reader import OpenShard, read

RUN = "0" * 16
MANY = 96


def shard(rank, rows):
    """One rank's part of ``x``, which has a row for each rank, and a tensor of its own."""
    specs = [TensorSpec("x", "F32", (len(rows), 2)), TensorSpec("own", "F32", (1,))]
    layout = Layout.plan(specs)
    facts = {"x": {"scope": "shard", "global_shape": [MANY, 2], "offsets": [rows[0], 0]}}
    meta = CaptureMeta(RUN, START, 1, rank, MANY, 1, tensors=facts)
    return OpenShard(meta, layout, MemoryBlocks(memoryview(b""), None, f"rank {rank}"))


def opened(wanted, rows_of, *, lost=(), near=0, neighbours=()):
    """The ranks whose shards rank 0 opens for some rows of ``x``, and why that is not enough.

    ``rows_of`` gives the rows of each rank.
    """
    chosen = {n: Entry("x", RUN, START, 1, n, MANY) for n in range(MANY) if n not in lost}
    box = ((wanted[0], 0), (len(wanted), 2))
    assembly = Assembly(0, lambda name, shape: box if name == "x" else whole_box(name, shape))
    order = [0]
    assembly.add(shard(0, rows_of(0)))
    assembly.request(["x", "own"])
    left = nearest_first(chosen, near, neighbours)
    left.remove(0)

    def add(rank):
        order.append(rank)
        assembly.add(shard(rank, rows_of(rank)))

    return order, complete(assembly, left, add)


def test_rows_in_the_order_of_the_ranks_are_found_near_the_rank_that_is_most_like_this_one():
    order, failure = opened(range(50, 53), lambda rank: range(rank, rank + 1), near=51)

    assert sorted(order) == [0, 50, 51, 52]
    assert failure is None


def test_rows_in_any_other_order_are_found_in_the_end():
    order, _ = opened(range(1, 2), lambda rank: range(-rank % MANY, -rank % MANY + 1))

    assert order[-1] == MANY - 1
    assert len(set(order)) == len(order) <= MANY


def test_ranks_of_the_same_node_are_asked_first():
    def rows_of(rank):
        return range(-rank % MANY, -rank % MANY + 1)

    assert opened(range(1, 2), rows_of, neighbours=(95,)) == ([0, 95], None)


def test_a_row_that_is_nowhere_is_named():
    _, failure = opened(range(50, 53), lambda rank: range(rank, rank + 1), lost=[51])

    assert failure.text == "x: a part of it is in no shard within reach"


def test_the_shards_of_many_ranks_do_not_take_all_descriptors_of_a_process(tmp_path, monkeypatch):
    """As in a restart with fewer ranks: each opens the shards of many."""
    monkeypatch.setattr(level, "MOST_OPEN", 2)
    storage = LocalStorage(str(tmp_path))
    for rank in range(8):
        Snapshot(1, rank=rank, world_size=8).write(storage)
    source = level.Level(PersistentLevel(str(tmp_path)))
    num_before = len(os.listdir("/proc/self/fd"))

    with contextlib.ExitStack() as stack:
        shards = []
        for entry in inventory_of(storage).entries:
            shards.append(source.open(entry, f"rank {entry.rank}"))
            stack.callback(shards[-1].blocks.close)
        assert len(os.listdir("/proc/self/fd")) <= num_before + 2 * 2

        for shard in shards:
            image = Snapshot(1, rank=shard.meta.rank, world_size=8).image
            got = bytearray(len(image))

            def put(offset, data, got=got):
                got[offset : offset + len(data)] = data

            read({shard: [WantedBytes(0, len(image), put)]})
            assert got == image
