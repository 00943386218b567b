"""A node's part: index, metadata and shards of all its ranks, read while they fill; without what many nodes hold."""

import threading

import pytest
from support.parity_group import LAYOUT, START, Captures, image_of

from lazysnap.errors import FormatError
from lazysnap.keeper.node_part import NodePart, find_capture, find_shard, read_index
from lazysnap.memory.capture_reader import CaptureAborted, CaptureReader
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta


@pytest.fixture
def ranks():
    made = [Captures(number, 2) for number in range(2)]
    yield made
    for captures in made:
        captures.close()


def part_of(ranks, step, most_lost=1):
    readers = []
    for captures in ranks:
        slot, view = find_capture(captures.keeper.values(), START, step)
        readers.append(CaptureReader(slot, view.sequence, lambda: None))
    return NodePart(readers, most_lost)


def content(part):
    return bytes(part.view(0, part.size_bytes))


def test_it_holds_metadata_and_shard_of_every_rank(ranks):
    for captures in ranks:
        captures.capture(4)
    part = part_of(ranks, 4)

    index = read_index(part.view, part.size_bytes)
    assert index == part.index
    assert [rank for rank, *_ in index] == [0, 1]
    whole = content(part)
    for captures in ranks:
        meta, offset, size = find_shard(part.view, part.size_bytes, captures.rank)
        assert CaptureMeta.from_bytes(meta).rank == captures.rank
        assert whole[offset : offset + size] == image_of(4, captures.rank)
    part.check()
    part.finish()


def test_any_range_of_it_is_the_same_bytes(ranks):
    for captures in ranks:
        captures.capture(4)
    part = part_of(ranks, 4)
    whole = content(part)
    for start in range(0, part.size_bytes, 37_111):
        assert bytes(part.view(start, 50_000)) == whole[start : start + 50_000]


def test_it_is_read_while_the_captures_fill_and_is_void_if_one_is_torn(ranks):
    ranks[0].capture(4)
    slot = ranks[1].fill(ranks[1].begin(4), 0.5)
    part = part_of(ranks, 4)
    came = threading.Event()
    waiting = threading.Thread(target=lambda: (part.view(0, part.size_bytes), came.set()), daemon=True)
    first = find_shard(part.view, part.size_bytes, 0)[1]
    part.view(0, first + LAYOUT.size_bytes)  # the first rank's is there
    waiting.start()
    assert not came.is_set()
    ranks[1].fill(slot).commit(copied_ns=1)
    assert came.wait(60)
    part.finish()

    slot.discard(slot.view().sequence)
    for check in (part.check, part.finish):
        with pytest.raises(CaptureAborted):
            check()


def test_the_newest_capture_of_a_step_is_meant_and_a_later_start_does_not_count(ranks):
    captures = ranks[0]
    captures.capture(4)
    assert find_capture(captures.keeper.values(), START, 5) is None, "it may come"
    again = captures.capture(4)
    captures.capture(4, START + 1)
    slot, view = find_capture(captures.keeper.values(), START, 4)
    assert slot.slot_id == again.slot_id
    assert view.sequence == 2
    with pytest.raises(CaptureAborted, match="not in memory any more"):
        find_capture(captures.keeper.values(), START, 5)


@pytest.mark.parametrize(("most_lost", "names"), [(1, ["own"]), (2, ["own"]), (3, ["many", "own"])])
def test_what_more_nodes_hold_than_may_be_lost_is_left_out(most_lost, names):
    facts = {"many": {"scope": "full", "global_shape": [9_000], "offsets": [0], "nodes": 3}}
    layout = Layout.plan([TensorSpec("many", "U8", (9_000,)), TensorSpec("own", "U8", (100,))])
    captures = Captures(0, 1, layout, facts)
    captures.capture(4)
    part = part_of([captures], 4, most_lost)
    meta, offset, size = find_shard(part.view, part.size_bytes, 0)
    stored = Layout.parse(part.view(offset, size), size, "part")
    assert sorted(spec.name for spec in stored.specs) == names
    assert sorted(CaptureMeta.from_bytes(meta).tensors) == ["many"] * ("many" in names)
    at = offset + stored.find("own")[1]
    assert bytes(part.view(at, 100)) == bytes([4]) * 100
    part.finish()
    captures.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"[1]",
        (10).to_bytes(8, "little") + b"[[0,-1,5]]",
        (10).to_bytes(8, "little") + b"[[0,1,{}]]",
        (10).to_bytes(8, "little") + b"[[0,9,90]]",
        (90_000).to_bytes(8, "little") + b"[" * 90_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_an_index_that_is_none_is_refused(data):
    with pytest.raises(FormatError, match="a node's part"):
        read_index(lambda offset, length: memoryview(data[offset : offset + length]), max(len(data), 9))
