"""Parts of several shards put together."""

import torch
from support.names import START

from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.assembly import Assembly, whole_box
from lazysnap.snapshots.reader import OpenShard
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import into, room_for


def shard(rank, tensors, *, scopes=(), aliases=None):
    """In memory: ``tensors`` by name, in float32; ``scopes`` gives global shape and offsets of those that are parts."""
    specs = [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    layout = Layout.plan(specs)
    image = bytearray(layout.size_bytes)
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        image[offset : offset + spec.nbytes] = tensors[spec.name].contiguous().numpy().tobytes()
    facts = {name: {"scope": "shard", "global_shape": whole, "offsets": at} for name, whole, at in scopes}
    state = {name: {"$": "tensor", "v": name} for name in [*tensors, *(aliases or {})]}
    meta = CaptureMeta("0" * 16, START, 1, rank, 2, 1, tensors=facts, aliases=aliases or {}, state=state)
    return OpenShard(meta, layout, MemoryBlocks(memoryview(image), None, f"rank {rank}"))


def state_of(own, *others, box=whole_box):
    assembly = Assembly(own.meta.rank, box)
    assembly.add(own)
    assembly.request(own.meta.state)
    for other in others:
        assembly.add(other)
    assert list(assembly.missing) == []
    reads, made = Reads(), {}
    for tensor in map(assembly.tensor, own.meta.state):
        if tensor.key not in made:
            made[tensor.key] = room_for(tensor)
            reads.add(tensor, into(made[tensor.key]))
    reads.run()
    return {name: made[assembly.tensor(name).key] for name in own.meta.state}


def test_what_is_tied_on_another_rank_alone_is_not_tied_here():
    mine = shard(0, {"x": torch.ones(3), "y": torch.zeros(3)})
    other = shard(1, {"y": torch.full((3,), 7.0)}, aliases={"x": "y"})

    state = state_of(mine, other)

    assert state["x"].tolist() == [1, 1, 1]
    assert state["y"].tolist() == [0, 0, 0]


def test_columns_of_several_shards_make_one_tensor_and_its_further_name_is_the_same():
    table = torch.arange(24.0).reshape(4, 6)
    left = shard(0, {"w": table[:, :2]}, scopes=[("w", [4, 6], [0, 0])], aliases={"tied": "w"})
    right = shard(1, {"w": table[:, 2:]}, scopes=[("w", [4, 6], [0, 2])], aliases={"tied": "w"})

    state = state_of(left, right)

    assert torch.equal(state["w"], table)
    assert state["tied"] is state["w"]


def test_pieces_that_are_cut_in_both_dimensions_and_a_number_without_any():
    table = torch.arange(24.0).reshape(6, 4)
    corners = [(0, 4, 0, 2), (0, 4, 2, 4), (4, 6, 0, 4)]
    pieces = [
        shard(rank, {"w": table[a:b, c:d]}, scopes=[("w", [6, 4], [a, c])]) for rank, (a, b, c, d) in enumerate(corners)
    ]
    number = shard(3, {"n": torch.tensor(5.0)}, scopes=[("n", [], [])])
    first = shard(0, {"w": table[:4, :2]}, scopes=[("w", [6, 4], [0, 0])])
    first.meta.state["n"] = {"$": "tensor", "v": "n"}

    state = state_of(first, *pieces[1:], number)

    assert torch.equal(state["w"], table)
    assert state["n"] == 5


def test_a_tensor_whose_rows_several_ranks_stored_gets_its_memory_order_back():
    table = torch.arange(24.0).reshape(6, 4).T
    rows = [(0, table[:2]), (1, table[2:])]
    halves = [shard(rank, {"w": part}, scopes=[("w", [4, 6], [2 * rank, 0])]) for rank, part in rows]
    for half in halves:
        half.meta.tensors["w"]["order"] = [1, 0]

    state = state_of(*halves)

    assert torch.equal(state["w"], table)
    assert state["w"].stride() == table.stride()
