"""Snapshots on storage: whole or not there, whatever breaks. Real files, real full disks, real deaths."""

import contextlib
import signal
import subprocess
import threading

import pytest
from deaths import run_forks
from snapshots import Image, files, meta, whole
from support.catalogue import inventory_of
from support.image import write_shard
from support.names import directory_of
from support.snapshots import Snapshot

from lazysnap.errors import LevelError
from lazysnap.levels.blocks import WantedBytes
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.node_file import FilePlace, delete_files
from lazysnap.levels.storage import probe_name
from lazysnap.levels.store import keep, open_storage, release
from lazysnap.levels.watched import WatchedStorage
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import open_snapshot, read


@pytest.fixture(params=["disk", "memory"])
def storage(request, tmp_path):
    return open_storage(str(tmp_path / "run") if request.param == "disk" else f"memory://{tmp_path.name}/run")


def test_bytes_are_written_while_later_ones_are_still_on_their_way(tmp_path):
    image, first_block_asked, rest = Image(7, 20_000_000), threading.Event(), threading.Event()

    def view(offset: int, length: int) -> memoryview:
        if offset >= 16 << 20:
            first_block_asked.set()
            assert rest.wait(60)
        return Image.view(image, offset, length)

    image.view = view
    storage = open_storage(str(tmp_path))
    writer = threading.Thread(target=write_shard, args=(storage, meta(7), image))
    writer.start()
    assert first_block_asked.wait(60)
    (temporary,) = files(tmp_path)
    assert ".tmp-" in temporary
    assert inventory_of(storage).entries == ()
    rest.set()
    writer.join(30)

    assert whole(storage) == [7]


def test_a_place_that_cannot_be_written_is_named():
    with pytest.raises(LevelError, match="/proc/lazysnap"):
        write_shard(open_storage("/proc/lazysnap"), meta(1), Image(1))


def test_a_directory_that_is_removed_costs_one_snapshot_and_is_made_again(tmp_path):
    """Not at once: a program that removes it with all around it would find a part of it there again."""
    storage = open_storage(str(tmp_path / "run"))
    write_shard(storage, meta(1), Image(1))
    subprocess.run(["rm", "-r", tmp_path / "run"], check=True)
    with pytest.raises(LevelError, match="No such file"):
        write_shard(storage, meta(2), Image(2))
    write_shard(storage, meta(3), Image(3))

    assert whole(storage) == [3]


def test_a_directory_that_is_removed_while_a_snapshot_is_written_is_made_again(tmp_path):
    class Removes(Image):
        def finish(self) -> None:
            subprocess.run(["rm", "-r", tmp_path / "run"], check=True)

    storage = open_storage(str(tmp_path / "run"))
    for step, image in ((1, Removes(1)), (2, Image(2))):
        with pytest.raises(LevelError):
            write_shard(storage, meta(step), image)
    write_shard(storage, meta(3), Image(3))

    assert whole(storage) == [3]


def test_foreign_files_and_half_snapshots_are_not_snapshots(tmp_path):
    storage = open_storage(str(tmp_path))
    write_shard(storage, meta(1), Image(1))
    for name in (
        "checkpoint-5/model.safetensors",
        f"{directory_of(9)}/node-00000-of-00001.safetensors",
        f"{directory_of(8)}/.nfs0001",
        "last.ckpt",
        f"{directory_of(7)}/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    assert whole(storage) == [1]


def test_names_without_a_snapshot_go_when_they_are_old(a_day_later, storage):
    for step in (1, 2):
        write_shard(storage, meta(step), Image(step))
        keep(storage, inventory_of(storage).entries[-1].snapshot, f"at-{step}")
    directory = inventory_of(storage).entries[0].snapshot.directory
    for name in storage.list(directory):
        if not name.startswith("keep-"):
            storage.delete(f"{directory}/{name}")

    assert sweep(storage) == [f"{directory}/keep-at-1"]
    assert storage.list(directory) == []
    assert [entry.names for entry in inventory_of(storage).entries] == [("at-2",)]


def test_a_small_file_of_a_try_goes_a_day_later(tmp_path, request):
    storage, name = open_storage(str(tmp_path)), probe_name()
    storage.put(name, b"lazysnap")
    storage.put(f"{name}0", b"somebody else's")

    assert sweep(storage) == [], "it may go on"
    request.getfixturevalue("a_day_later")
    assert sweep(storage) == [name]
    assert storage.list() == [f"{name}0"]


def test_what_looks_at_every_directory_tells_that_it_moves_and_ends_when_nobody_waits(storage):
    for step in (1, 2, 3):
        write_shard(storage, meta(step), Image(step))
        keep(storage, inventory_of(storage).entries[-1].snapshot, "best")
    moved = []

    sweep(WatchedStorage(storage, lambda: moved.append("sweep")))
    assert moved.count("sweep") >= 3

    def beat():
        moved.append("release")
        if moved.count("release") == 2:
            raise CaptureAborted("nobody waits")

    with pytest.raises(CaptureAborted):
        release(WatchedStorage(storage, beat), None, "best")
    assert {entry.names for entry in inventory_of(storage).entries} == {("best",)}
    assert len(release(storage, None, "best")) == 3


def test_a_sweep_removes_what_dead_writers_left_and_nothing_else(tmp_path, a_day_later):
    storage = open_storage(str(tmp_path))
    write_shard(storage, meta(1), Image(1))
    kept = files(tmp_path)
    directory = tmp_path / directory_of(2)
    directory.mkdir()
    shard = "node-00000-of-00001.safetensors"
    (directory / f".{shard}.tmp-1-0123abcd").write_bytes(b"x")
    (directory / shard).write_bytes(b"x")
    (directory / ".node-00001-of-00002.safetensors.tmp-1-0123abcd").write_bytes(b"another node's")
    (tmp_path / directory_of(3)).mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / shard).write_bytes(b"not in a snapshot's directory")

    gone = sweep(storage, lambda name: name.node == 0)

    assert len(gone) == 2
    assert len(files(tmp_path)) == len(kept) + 2
    assert not (tmp_path / directory_of(3)).exists()
    assert whole(storage) == [1]


def work(root):
    storage = open_storage(root)
    with open(f"{root}.committed", "w", buffering=1) as committed:
        for step in range(1, 5):
            write_shard(storage, meta(step), Image(step))
            committed.write(f"{step}\n")
            for entry in inventory_of(storage).entries:
                if entry.step <= step - 2:
                    delete_files([FilePlace.of(storage, entry)])
        write_shard(storage, meta(4), Image(4))


def test_killed_at_any_point_of_a_write_or_a_deletion_what_was_committed_is_whole(tmp_path):
    log = tmp_path / "points"
    assert run_forks("test_store", [(tmp_path / "dry", "", log)]) == [0]
    passed = log.read_text().splitlines()
    assert len(set(passed)) >= 10
    points = [f"{name}:{count}" for name in sorted(set(passed)) for count in sorted({1, passed.count(name)})]
    ends = run_forks("test_store", [(tmp_path / point, f"{point}:kill", "") for point in points])
    assert ends == [-signal.SIGKILL] * len(points)
    for point in points:
        root = tmp_path / point
        committed = [int(line) for line in (tmp_path / f"{point}.committed").read_text().split()]
        storage = open_storage(str(root))

        steps = whole(storage)

        assert set(committed[-2:]) <= set(steps), f"{point}: {committed} were committed, {steps} are whole"
        sweep(storage)
        assert [entry.step for entry in inventory_of(storage).entries] == whole(storage)
        assert not [path for path in files(root) if ".tmp-" in path]
        assert inventory_of(storage).problems == ()


def test_an_open_snapshot_is_read_again_and_again_after_retention_deleted_it(tmp_path):
    """On a file system an open file stays readable."""
    storage = open_storage(str(tmp_path))
    snapshot = Snapshot(1, elements=100_000)
    entry = snapshot.write(storage)
    catalogue = Catalogue(storage)
    (plan,) = catalogue.plans()
    with contextlib.closing(open_snapshot(catalogue, plan)) as found:
        assert snapshot.delete(storage)
        [shard] = found.shards
        for _ in range(2):
            out = bytearray(len(snapshot.image))

            def put(at, data, out=out):
                out[at : at + len(data)] = data

            read({shard: [WantedBytes(0, len(out), put)]})
            assert out == snapshot.image
    with pytest.raises(FileNotFoundError):
        FilePlace.of(storage, entry).read_manifest()
