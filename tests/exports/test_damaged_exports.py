"""Whatever is damaged, lost or foreign is an error that names it, in every format; nothing of it is written."""

import contextlib

import pytest
import torch
from support.damage import flip
from support.saving import Snapshot, directory_of, rows, write, write_all
from support.snapshots import lone_manifest

import lazysnap
from lazysnap import LazySnapError
from lazysnap.shard.manifest import CaptureMeta, Manifest

pytestmark = pytest.mark.slow

WORLD = 3


def state():
    torch.manual_seed(1)
    return {"w": torch.randn(30, 40), "v": torch.randn(9), "n": 5}


@pytest.fixture(params=["out.safetensors", "out.ckpt", "out"])
def out(request, tmp_path_factory):
    return tmp_path_factory.mktemp("out") / request.param


@contextlib.contextmanager
def refused(out, *words):
    """One error that says all of these words, and nothing is left."""
    with pytest.raises((LazySnapError, OSError)) as caught:
        yield
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert list(out.parent.iterdir()) == []


@pytest.fixture
def folder(tmp_path):
    """A snapshot of three ranks, in blocks of a page."""
    write_all(Snapshot(str(tmp_path), WORLD, block_bytes=4096), state(), rows(WORLD))
    return tmp_path / directory_of(10)


def shard(folder, rank):
    return folder / f"node-{rank:05d}-of-{WORLD:05d}.safetensors"


def manifest(folder, rank):
    return shard(folder, rank).with_suffix(".json")


def test_a_flipped_byte_of_a_tensor_is_found_in_its_block(folder, out):
    path = shard(folder, 2)
    flip(path, path.stat().st_size - 1)

    with refused(out, path.name, "block 1", "the manifest says"):
        lazysnap.export(folder.parent, out)


def test_a_header_that_was_changed_is_found_even_if_it_can_be_read(folder, out):
    """Two tensors of one shape exchange their names: as a header it is perfect."""
    path = shard(folder, 1)
    data = path.read_bytes()
    assert data.count(b'"w"') == 1
    assert data.count(b'"v"') == 1
    path.write_bytes(data.replace(b'"w"', b'"?"').replace(b'"v"', b'"w"').replace(b'"?"', b'"v"'))

    with refused(out, path.name):
        lazysnap.export(folder.parent, out)


def test_names_exchanged_between_tensors_of_one_shape_are_found(tmp_path, out):
    one = {"a": torch.full((8,), 1.0), "b": torch.full((8,), 2.0)}
    write_all(Snapshot(str(tmp_path), 1, block_bytes=4096), one, lambda name, tensor, rank: (None, tensor))
    (path,) = tmp_path.glob("*/*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"a"', b'"?"').replace(b'"b"', b'"a"').replace(b'"?"', b'"b"'))

    with refused(out, path.name, "block 0"):
        lazysnap.export(tmp_path, out)


def test_a_lost_shard_is_named(folder, out):
    shard(folder, 1).unlink()

    with refused(out, "no complete snapshot", shard(folder, 1).name, "the shard of rank 1 is lost"):
        lazysnap.export(folder.parent, out)
    with refused(out, "the shard of rank 1 is lost"):
        lazysnap.export(folder.parent, out, which=10)


def test_a_lost_manifest_is_named(folder, out):
    manifest(folder, 0).unlink()

    with refused(out, "step 10 is not complete", "no valid manifest there has rank 0;"):
        lazysnap.export(folder.parent, out)


def test_a_truncated_shard_is_named_with_both_sizes(folder, out):
    size = shard(folder, 1).stat().st_size
    with open(shard(folder, 1), "r+b") as file:
        file.truncate(size - 10)

    with refused(out, shard(folder, 1).name, f"{size - 10} bytes, the manifest says {size}"):
        lazysnap.export(folder.parent, out)


@pytest.mark.parametrize("what", ["truncated", "flipped", "empty"])
def test_a_damaged_manifest_is_named(folder, what, out):
    path = manifest(folder, 2)
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-9], "flipped": data.replace(b'"w"', b'"x"'), "empty": b""}[what])

    with refused(out, "the manifest is damaged", path.name):
        lazysnap.export(folder.parent, out)


def test_a_manifest_of_another_rank_is_named(folder, out):
    manifest(folder, 1).write_bytes(manifest(folder, 2).read_bytes())

    with refused(out, manifest(folder, 1).name, "its name says otherwise"):
        lazysnap.export(folder.parent, out)


def test_a_snapshot_moved_to_another_step_is_no_snapshot_of_that_step(folder, out):
    folder.rename(folder.parent / directory_of(11))

    with refused(out, f"holds {directory_of(10)}", "its name says otherwise"):
        lazysnap.export(folder.parent, out)


def test_a_shard_of_another_snapshot_under_a_right_manifest_is_found(folder, out):
    other = {"w": torch.zeros(30, 40), "v": torch.zeros(9), "n": 5}
    write_all(Snapshot(str(folder.parent), WORLD, step=11), other, rows(WORLD))
    shard(folder, 1).write_bytes(shard(folder.parent / directory_of(11), 1).read_bytes())

    with refused(out, shard(folder, 1).name, "block 1"):
        lazysnap.export(folder.parent, out, which=10)


def test_a_piece_that_no_shard_has_is_an_error_before_anything_is_filled(tmp_path, out):
    """Every manifest is there, but rank 1 did not write its rows: DCP itself would leave them as they are."""
    cut = rows(WORLD)
    snapshot = Snapshot(str(tmp_path), WORLD)
    write_all(snapshot, state(), lambda name, t, rank: None if (name, rank) == ("w", 1) else cut(name, t, rank))

    with refused(out, "tensor w", "800 of 1200 elements"):
        lazysnap.export(tmp_path, out)


def test_pieces_that_overlap_and_leave_a_hole_are_an_error(tmp_path, out):
    snapshot = Snapshot(str(tmp_path), 2)
    skeleton = {"w": {"$": "tensor", "v": "w"}}
    write(snapshot, 0, {"w": (torch.zeros(3, 2), ((4, 2), (0, 0), "shard"))}, skeleton)
    write(snapshot, 1, {"w": (torch.zeros(1, 2), ((4, 2), (1, 0), "shard"))}, skeleton)

    with refused(out, "tensor w", "6 of 8 elements"):
        lazysnap.export(tmp_path, out)


@pytest.mark.parametrize("difference", ["shape", "dtype"])
def test_ranks_that_disagree_on_a_tensor_are_an_error(tmp_path, difference, out):
    snapshot = Snapshot(str(tmp_path), 2)
    skeleton = {"w": {"$": "tensor", "v": "w"}}
    write(snapshot, 0, {"w": (torch.zeros(2, 2), ((4, 2), (0, 0), "shard"))}, skeleton)
    second, whole = (torch.zeros(3, 2), (5, 2)) if difference == "shape" else (torch.zeros(2, 2).double(), (4, 2))
    write(snapshot, 1, {"w": (second, (whole, (2, 0), "shard"))}, skeleton)

    with refused(out, "node-00001", "tensor w is", "elsewhere"):
        lazysnap.export(tmp_path, out)


def test_ranks_that_number_their_parameters_differently_are_refused(tmp_path, out):
    """As pipeline stages do: the states of two parameters would have one name."""
    for rank in range(2):
        snapshot = Snapshot(str(tmp_path), 2, parameters={"optimizer": [f"stage{rank}.weight"]})
        place = ((4,), (2 * rank,), "shard")
        write(snapshot, rank, {"w": (torch.zeros(2), place)}, {"w": {"$": "tensor", "v": "w"}})

    with refused(out, "hold other parameters than those of rank 0"):
        lazysnap.export(tmp_path, out, which=10)


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
    "elsewhere os.system": lambda fields: fields["tensors"]["w"].update(dtype="os.system"),
    "['x']": lambda fields: fields["tensors"]["w"].update(dtype=["x"]),
    "the small state is list": lambda fields: fields.update(state=[]),
    "is no valid encoding: TypeError: 'int'": lambda fields: fields.update(state={"$": "dict", "v": 3}),
    "unhashable": lambda fields: fields.update(state={"w": {"$": ["tensor"], "v": "w"}}),
    "NoneType where a name must be": lambda fields: fields.update(state={"w": {"$": "tensor"}}),
    "where a name must be": lambda fields: fields.update(state={"w": {"$": "tensor", "v": 7}}),
    "unknown tag 'nobody'": lambda fields: fields.update(state={"w": {"$": "nobody", "v": 1}}),
    "no shard has the tensor 'none'": lambda fields: fields.update(state={"w": {"$": "tensor", "v": "none"}}),
    "the shard has none of that name": lambda fields: fields.update(aliases={"w": "of another"}),
}


@pytest.mark.parametrize("message", NONSENSE)
def test_a_manifest_with_nonsense_in_it_is_refused(folder, message, out):
    tampered(folder, 0, NONSENSE[message])

    # In a file of weights there is nothing of the state but names of tensors.
    words = (message, str(folder.parent)) if out.suffix != ".safetensors" else ()
    with refused(out, *words):
        lazysnap.export(folder.parent, out, which=10)
