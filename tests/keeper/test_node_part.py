"""A node's part: index, metadata and shards of all its ranks, read while they fill; without what many nodes hold."""

import threading

import pytest
from support.node_rig import RUN, STARTS, Rank, image_of
from support.waiting import until

from lazysnap.errors import FormatError
from lazysnap.keeper.node_part import find_shard, open_part, read_index
from lazysnap.keeper.node_slots import NodeSlots
from lazysnap.memory.arena import Slot
from lazysnap.memory.failures import CaptureAborted
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta

START = STARTS[0]


@pytest.fixture
def ranks():
    found = [Rank(number, 2) for number in range(2)]
    for rank in found:
        rank.begin_run(START)
    return found


def opened(ranks, step, most_lost=1):
    return open_part(NodeSlots(lambda: ranks, START), step, most_lost, lambda: None)


def content(part):
    return bytes(part.view(0, part.size_bytes))


def test_it_holds_metadata_and_shard_of_every_rank(ranks):
    for rank in ranks:
        rank.finish(rank.begin(4, RUN))
    part = opened(ranks, 4)

    assert [(rank, frozen) for rank, _, _, frozen in read_index(part.view, part.size_bytes)] == [(0, None), (1, None)]
    whole = content(part)
    for rank in ranks:
        meta, offset, size = find_shard(part.view, part.size_bytes, rank.rank)
        assert CaptureMeta.from_bytes(meta).rank == rank.rank
        assert whole[offset : offset + size] == image_of(4, rank.rank)
    part.finish()


def test_any_range_of_it_is_the_same_bytes(ranks):
    for rank in ranks:
        rank.finish(rank.begin(4, RUN))
    part = opened(ranks, 4)
    whole = content(part)
    for start in range(0, part.size_bytes, 37_111):
        assert bytes(part.view(start, 50_000)) == whole[start : start + 50_000]


def test_it_is_read_while_the_captures_fill_and_is_void_if_one_is_torn(ranks):
    slots = [rank.begin(4, RUN) for rank in ranks]
    ranks[0].finish(slots[0])
    part = opened(ranks, 4)
    came = threading.Event()
    waiting = threading.Thread(target=lambda: (part.view(0, part.size_bytes), came.set()), daemon=True)
    first = find_shard(part.view, part.size_bytes, 0)[1]
    part.view(0, first + len(image_of(4)))  # the first rank's is there
    waiting.start()
    assert not came.is_set()
    ranks[1].finish(slots[1])
    assert came.wait(60)
    part.finish()

    slots[1].discard()
    with pytest.raises(CaptureAborted):
        part.finish()


def test_a_node_that_reads_may_be_a_little_ahead_of_the_ranks(ranks):
    ranks[0].finish(ranks[0].begin(4, RUN))
    found = []
    waiting = threading.Thread(target=lambda: found.append(opened(ranks, 4)), daemon=True)
    waiting.start()
    assert not found
    ranks[1].finish(ranks[1].begin(4, RUN))
    until(lambda: found)


def test_a_step_that_a_rank_passed_is_refused_at_once(ranks):
    for step in (4, 5, 6, 7):
        for rank in ranks:
            rank.finish(rank.begin(step, RUN))
    with pytest.raises(CaptureAborted, match="not in memory any more"):
        opened(ranks, 4)


class Replicated(Rank):
    """A rank with a tensor that three nodes hold, and one of its own."""

    LAYOUT = Layout.plan([TensorSpec("many", "U8", (9_000,)), TensorSpec("own", "U8", (100,))])

    def capture(self, step):
        slot = self._slots[0]
        facts = {"many": {"scope": "full", "global_shape": [9_000], "offsets": [0], "nodes": 3}}
        meta = CaptureMeta(RUN, START, step, self.rank, self.world_size, 0, tensors=facts)
        self.sequence += 1
        size = self.LAYOUT.size_bytes
        slot.begin(step, sequence=self.sequence, image_bytes=size, meta=meta.to_bytes(), pin=False)
        header = self.LAYOUT.header
        slot.image[: len(header)] = header
        slot.image[len(header) : size] = bytes([7]) * (size - len(header))
        slot.commit()
        return slot


@pytest.mark.parametrize(("most_lost", "names"), [(1, ["own"]), (2, ["own"]), (3, ["many", "own"])])
def test_what_more_nodes_hold_than_may_be_lost_is_left_out(most_lost, names):
    rank = Replicated(0, 1)
    rank.begin_run(START)
    slot: Slot = rank.capture(4)
    part = opened([rank], 4, most_lost)
    meta, offset, size = find_shard(part.view, part.size_bytes, 0)
    layout = Layout.parse(part.view(offset, size), size, "part")
    assert sorted(spec.name for spec in layout.specs) == names
    assert sorted(CaptureMeta.from_bytes(meta).tensors) == ["many"] * ("many" in names)
    at = offset + layout.find("own")[1]
    assert bytes(part.view(at, 100)) == bytes([7]) * 100
    part.finish()
    assert slot.status().step == 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"[1]",
        (13).to_bytes(8, "little") + b"[[0,-1,5,null]",
        (12).to_bytes(8, "little") + b"[[0,1,5,{}]]",
        (14).to_bytes(8, "little") + b"[[0,9,90,null]]",
    ],
)
def test_an_index_that_is_none_is_refused(data):
    with pytest.raises(FormatError, match="a node's part"):
        read_index(lambda offset, length: memoryview(data[offset : offset + length]), max(len(data), 9))
