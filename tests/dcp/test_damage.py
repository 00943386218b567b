"""Whatever is damaged, lost or foreign is an error that names it; nothing of it is loaded in silence."""

import re

import pytest
import torch
from saving import Snapshot, directory_of, rows, write, write_all
from support.damage import flip
from support.snapshots import lone_manifest
from test_reader import blank, load, refused

from lazysnap.shard.manifest import CaptureMeta, Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")

WORLD = 3


def state():
    torch.manual_seed(1)
    return {"w": torch.randn(30, 40), "v": torch.randn(9), "n": 5}


@pytest.fixture
def folder(tmp_path):
    """A snapshot of three ranks, in blocks of a page."""
    write_all(Snapshot(str(tmp_path), WORLD, block_bytes=4096), state(), rows(WORLD))
    return tmp_path / directory_of(10)


def shard(folder, rank):
    return folder / f"node-{rank:05d}-of-{WORLD:05d}.safetensors"


def manifest(folder, rank):
    return shard(folder, rank).with_suffix(".json")


@pytest.mark.parametrize(("rank", "planner_key"), [(0, "w"), (2, "v")])
def test_a_flipped_byte_of_a_tensor_is_found_in_its_block(folder, rank, planner_key):
    path = shard(folder, rank)
    flip(path, path.stat().st_size - 1)

    with refused(path.name, "block 1", "the manifest says"):
        load(folder.parent, {planner_key: blank(state())[planner_key]})


def test_a_flipped_byte_that_is_not_needed_does_no_harm(folder):
    flip(shard(folder, 2), 4096 + 100)
    flip(shard(folder, 2), shard(folder, 2).stat().st_size - 1)

    target = {"n": 0}
    load(folder.parent, target)

    assert target["n"] == 5


def test_without_verification_blocks_are_believed(folder):
    flip(shard(folder, 0), 4096 + 3)
    target = blank(state())

    load(folder.parent, target, verify=False)

    assert sum(int((target[name] != state()[name]).sum()) for name in ("w", "v")) == 1


def test_a_header_that_was_changed_is_found_even_if_it_can_be_read(folder):
    """Two tensors of one shape exchange their names: as a header it is perfect."""
    path = shard(folder, 1)
    data = path.read_bytes()
    assert data.count(b'"w"') == 1
    assert data.count(b'"v"') == 1
    path.write_bytes(data.replace(b'"w"', b'"?"').replace(b'"v"', b'"w"').replace(b'"?"', b'"v"'))

    with refused(path.name):
        load(folder.parent, blank(state()))


def test_names_exchanged_between_tensors_of_one_shape_are_found(tmp_path):
    one = {"a": torch.full((8,), 1.0), "b": torch.full((8,), 2.0)}
    write_all(Snapshot(str(tmp_path), 1, block_bytes=4096), one, lambda name, tensor, rank: (None, tensor))
    (path,) = tmp_path.glob("*/*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"a"', b'"?"').replace(b'"b"', b'"a"').replace(b'"?"', b'"b"'))
    target = {"a": torch.zeros(8)}

    with refused(path.name, "block 0"):
        load(tmp_path, target)


def test_a_lost_shard_is_named(folder):
    shard(folder, 1).unlink()

    with refused("no complete snapshot", shard(folder, 1).name, "the shard of rank 1 is lost"):
        load(folder.parent, blank(state()))
    with refused("the shard of rank 1 is lost"):
        load(folder.parent, blank(state()), step=10)


def test_a_lost_manifest_is_named(folder):
    manifest(folder, 0).unlink()

    with refused("step 10 is not complete", "no valid manifest there has rank 0;"):
        load(folder.parent, blank(state()))


def test_a_truncated_shard_is_named_with_both_sizes(folder):
    size = shard(folder, 1).stat().st_size
    with open(shard(folder, 1), "r+b") as file:
        file.truncate(size - 10)

    with refused(shard(folder, 1).name, f"{size - 10} bytes, the manifest says {size}"):
        load(folder.parent, blank(state()))


@pytest.mark.parametrize("what", ["truncated", "flipped", "empty"])
def test_a_damaged_manifest_is_named(folder, what):
    path = manifest(folder, 2)
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-9], "flipped": data.replace(b'"w"', b'"x"'), "empty": b""}[what])

    with refused("the manifest is damaged", path.name):
        load(folder.parent, blank(state()))


def test_a_manifest_of_another_rank_is_named(folder):
    manifest(folder, 1).write_bytes(manifest(folder, 2).read_bytes())

    with refused(manifest(folder, 1).name, "its name says otherwise"):
        load(folder.parent, blank(state()))


def test_a_snapshot_moved_to_another_step_is_no_snapshot_of_that_step(folder):
    folder.rename(folder.parent / directory_of(11))

    with refused(f"holds {directory_of(10)}", "its name says otherwise"):
        load(folder.parent, blank(state()))


def test_a_shard_of_another_snapshot_under_a_right_manifest_is_found(folder):
    other = {"w": torch.zeros(30, 40), "v": torch.zeros(9), "n": 5}
    write_all(Snapshot(str(folder.parent), WORLD, step=11), other, rows(WORLD))
    shard(folder, 1).write_bytes(shard(folder.parent / directory_of(11), 1).read_bytes())

    with refused(shard(folder, 1).name, "block 1"):
        load(folder.parent, blank(state()), step=10)


def test_a_piece_that_no_shard_has_is_an_error_before_anything_is_filled(tmp_path):
    """Every manifest is there, but rank 1 did not write its rows: DCP itself would leave them as they are."""
    cut = rows(WORLD)
    snapshot = Snapshot(str(tmp_path), WORLD)
    write_all(snapshot, state(), lambda name, t, rank: None if (name, rank) == ("w", 1) else cut(name, t, rank))
    target = blank(state())

    with refused("tensor w", "800 of 1200 elements"):
        load(tmp_path, target)

    assert not target["v"].any()
    target = {"v": torch.zeros(9)}
    load(tmp_path, target)
    assert target["v"].equal(state()["v"])


def test_pieces_that_overlap_and_leave_a_hole_are_an_error(tmp_path):
    snapshot = Snapshot(str(tmp_path), 2)
    skeleton = {"w": {"$": "tensor", "v": "w"}}
    write(snapshot, 0, {"w": (torch.zeros(3, 2), ((4, 2), (0, 0), "shard"))}, skeleton)
    write(snapshot, 1, {"w": (torch.zeros(1, 2), ((4, 2), (1, 0), "shard"))}, skeleton)

    with refused("tensor w", "6 of 8 elements"):
        load(tmp_path, {"w": torch.zeros(4, 2)})


@pytest.mark.parametrize("difference", ["shape", "dtype"])
def test_ranks_that_disagree_on_a_tensor_are_an_error(tmp_path, difference):
    snapshot = Snapshot(str(tmp_path), 2)
    skeleton = {"w": {"$": "tensor", "v": "w"}}
    write(snapshot, 0, {"w": (torch.zeros(2, 2), ((4, 2), (0, 0), "shard"))}, skeleton)
    second, whole = (torch.zeros(3, 2), (5, 2)) if difference == "shape" else (torch.zeros(2, 2).double(), (4, 2))
    write(snapshot, 1, {"w": (second, (whole, (2, 0), "shard"))}, skeleton)

    with refused("node-00001", "tensor w is", "elsewhere"):
        load(tmp_path, {"w": torch.zeros(4, 2)})


def test_ranks_that_number_their_parameters_differently_are_refused(tmp_path):
    """As pipeline stages do: the states of two parameters would have one name."""
    for rank in range(2):
        snapshot = Snapshot(str(tmp_path), 2, parameters={"optimizer": [f"stage{rank}.weight"]})
        place = ((4,), (2 * rank,), "shard")
        write(snapshot, rank, {"w": (torch.zeros(2), place)}, {"w": {"$": "tensor", "v": "w"}})

    with refused("hold other parameters than those of rank 0"):
        load(tmp_path, {"w": torch.zeros(4)}, step=10)


def test_frozen_tensors_that_are_gone_are_named(tmp_path):
    snapshot = Snapshot(str(tmp_path), 1)
    skeleton = {"base": {"$": "tensor", "v": "base"}}
    write(snapshot, 0, {}, skeleton, frozen={"base": torch.randn(4)})
    (image,) = tmp_path.glob("frozen-*/*.safetensors")
    flip(image, image.stat().st_size - 1)
    with refused(image.name, "block 0"):
        load(tmp_path, {"base": torch.zeros(4)})
    (folder,) = tmp_path.glob("frozen-*")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()

    with refused("frozen tensors", "which are not there"):
        load(tmp_path, {"base": torch.zeros(4)})


def tampered(folder, rank, change):
    """A manifest with a right checksum and wrong contents, as only an attacker writes it."""
    path = manifest(folder, rank)
    found = Manifest.decode(path.read_bytes(), "x")
    fields = {**found.meta.to_fields()}
    change(fields)
    meta = CaptureMeta.from_fields(fields, "x")
    header_bytes = found.shards[0].header_bytes
    path.write_bytes(lone_manifest(meta, header_bytes, found.checksums, found.created_ns).encode())


NONSENSE = {
    "bad global_shape [30, 40] or offsets [-1, 0]": lambda fields: fields["tensors"]["w"].update(offsets=[-1, 0]),
    "lies outside": lambda fields: fields["tensors"]["w"].update(offsets=[25, 0]),
    "bad global_shape [30]": lambda fields: fields["tensors"]["w"].update(global_shape=[30]),
    "bad global_shape 'x'": lambda fields: fields["tensors"]["w"].update(global_shape="x"),
    "'os.system' does not fit": lambda fields: fields["tensors"]["w"].update(dtype="os.system"),
    "['x']": lambda fields: fields["tensors"]["w"].update(dtype=["x"]),
    "the manifest says 3": lambda fields: fields["tensors"].update(w=3),
    "the manifest says None": lambda fields: fields["tensors"].update(w=None),
    "the small state is no dict": lambda fields: fields.update(state=[]),
    "is no valid encoding: TypeError: 'int'": lambda fields: fields.update(state={"$": "dict", "v": 3}),
    "unhashable": lambda fields: fields.update(state={"w": {"$": ["tensor"], "v": "w"}}),
    "KeyError: 'v'": lambda fields: fields.update(state={"w": {"$": "tensor"}}),
    "where the name of a tensor must be": lambda fields: fields.update(state={"w": {"$": "tensor", "v": 7}}),
    "unknown tag 'nobody'": lambda fields: fields.update(state={"w": {"$": "nobody", "v": 1}}),
    "no shard has the tensor 'none'": lambda fields: fields.update(state={"w": {"$": "tensor", "v": "none"}}),
    "the shard has none of that name": lambda fields: fields.update(aliases={"w": "of another"}),
}


@pytest.mark.parametrize("message", NONSENSE)
def test_a_manifest_with_nonsense_in_it_is_refused(folder, message):
    tampered(folder, 0, NONSENSE[message])

    with refused(message, str(folder.parent)):
        load(folder.parent, {"w": torch.zeros(30, 40)}, step=10)


def test_nothing_of_a_snapshot_is_ever_unpickled(folder, monkeypatch):
    """What DCP unpickles are bytes that the reader made itself, from decoded values."""
    seen = []
    original = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **more: seen.append(file.getvalue()) or original(file, **more))

    load(folder.parent, blank(state()))

    assert len(seen) == 1
    whole = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not re.search(rb"PK\x03\x04|\x80\x02\}", whole)
