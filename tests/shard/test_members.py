"""Whatever the ranks of a node hold: their file shows each of them exactly that, and is a safetensors file."""

import json
import random

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.keeper.node_source import NodeSource
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import PAGE, Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.members import member_layout, plan_node

SPECS = st.lists(
    st.tuples(st.sampled_from(["F64", "F32", "BF16", "U8", "BOOL"]), st.sampled_from([0, 1, 3, 511, 512, 4096, 5000])),
    max_size=5,
)
GENERATION = "00000000deadbeef"


def held(rank, specs, chance):
    """A rank's shard with tensors of these dtypes and lengths, full of noise, the first with a second name."""
    named = [TensorSpec(f"t{number}", dtype, (length,)) for number, (dtype, length) in enumerate(specs)]
    layout = Layout.plan(named, {"tied": "t0"} if named else None)
    meta = CaptureMeta("0" * 16, 1, 7, rank, 9, 3, generation=GENERATION)
    return golden.Held(meta, layout.header + chance.randbytes(layout.size_bytes - len(layout.header))), layout


@settings(max_examples=60, deadline=None)
@given(st.lists(SPECS, min_size=1, max_size=4), st.integers(0, 1 << 32), st.integers(1, 5))
def test_every_rank_finds_its_own_tensors_and_bytes(ranks, seed, pages):
    chance = random.Random(seed)
    parts = [held(2 * number, specs, chance) for number, specs in enumerate(ranks)]
    source = NodeSource([part for part, _ in parts])
    step = pages * PAGE
    data = b"".join(bytes(source.view(at, step)) for at in range(0, source.size_bytes, step))[: source.size_bytes]

    whole = Layout.parse(data, len(data), "place")

    assert len(whole.header) % PAGE == 0
    assert len(load(data)) == len(whole.specs)
    for part, own in parts:
        found = member_layout(whole, part.meta.rank, "place")
        assert [spec for spec in found.specs if spec.nbytes] == [spec for spec in own.specs if spec.nbytes]
        assert set(found.specs) == set(own.specs)
        assert found.metadata == own.metadata
        for spec in own.specs:
            at, was = found.find(spec.name)[1], own.find(spec.name)[1]
            assert data[at : at + spec.nbytes] == bytes(part.view(was, spec.nbytes))
        starts = [offset for spec, offset in zip(found.specs, found.offsets, strict=True) if spec.nbytes]
        assert not starts or min(starts) % PAGE == 0


def test_the_header_of_a_node_is_parsed_once_for_all_that_are_open():
    chance = random.Random(0)
    parts = [held(rank, [("U8", 100)], chance)[0] for rank in (0, 1)]
    source = NodeSource(parts)
    head = bytes(source.view(0, source.size_bytes))
    manifest = Manifest(parts[0].meta, "file", 8, Checksums.of(memoryview(head)), 1, tuple(p.meta for p in parts))
    first = manifest.layout(head, "place")

    second = manifest.of(1, "place").layout(bytearray(head), "place")

    assert second.whole is first.whole is not None
    assert second.specs != first.specs or second.offsets != first.offsets
    other = head.replace(b'"t0":', b'"t1":').replace(b"/t0", b"/t1")
    assert [spec.name for spec in manifest.layout(other, "place").specs] == ["t1"]


def with_header(change):
    """A node's file of two ranks, its header changed."""
    chance = random.Random(0)
    parts = [held(rank, [("F32", 10), ("U8", 3)], chance) for rank in (0, 1)]
    plan = plan_node([(part.meta.rank, layout) for part, layout in parts])
    fields = json.loads(plan.header[8:])
    fields = change(fields) or fields
    text = json.dumps(fields).encode().ljust(len(plan.header) - 8)
    return len(text).to_bytes(8, "little") + text, plan.size_bytes


def test_the_order_of_names_in_the_header_means_nothing():
    head, size = with_header(lambda fields: dict(reversed(fields.items())))

    found = member_layout(Layout.parse(head, size, "place"), 1, "place")

    assert [spec.name for spec in found.specs] == ["t0", "t1"]
    assert found.offsets == (2 * PAGE, 2 * PAGE + 40)


def test_a_rank_whose_tensors_do_not_stand_together_is_refused():
    def swap(fields):
        fields["rank-00000/t1"], fields["padding-00001"] = (
            {**fields["rank-00000/t1"], "data_offsets": [PAGE - 3, PAGE]},
            {**fields["padding-00001"], "data_offsets": [40, PAGE - 3]},
        )

    head, size = with_header(swap)
    with pytest.raises(ShardCorrupt, match="place: the tensors of rank 0 do not stand together"):
        member_layout(Layout.parse(head, size, "place"), 0, "place")


def test_a_header_over_the_limit_is_refused_before_anything_is_written():
    layout = Layout.plan([TensorSpec("x" * 30_000_000, "U8", (1,))])

    with pytest.raises(FormatError, match="for 4 ranks; the limit is"):
        plan_node([(rank, layout) for rank in range(4)])
