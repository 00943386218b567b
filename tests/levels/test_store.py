"""Snapshots on storage: whole or not there, whatever breaks. Real files, real full disks, real deaths."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
from snapshots import Image, files, meta, mount, whole
from support.names import directory_of

from lazysnap.errors import CaptureAborted, LevelFull, LevelUnavailable
from lazysnap.levels import open_store
from lazysnap.levels.storage import probe_name


@pytest.fixture(params=["disk", "tmpfs", "memory"])
def store(request, tmp_path):
    if request.param == "disk":
        yield open_store(str(tmp_path / "run"))
    elif request.param == "tmpfs":
        with_room = tmp_path / "tmpfs"
        mount(with_room, "16m")
        yield open_store(str(with_room / "run"))
        subprocess.run(["umount", with_room], check=True)
    else:
        yield open_store(f"memory://{tmp_path.name}/run")


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "small"
    mount(path, "64k")
    yield path
    subprocess.run(["umount", path], check=True)


def test_bytes_are_written_while_later_ones_are_still_on_their_way(tmp_path):
    image, first_block_asked, rest = Image(7, 20_000_000), threading.Event(), threading.Event()

    def wait(upto: int) -> None:
        if upto > 16 << 20:
            first_block_asked.set()
            assert rest.wait(60)

    image.wait = wait
    store = open_store(str(tmp_path))
    writer = threading.Thread(target=store.write, args=(meta(7), image))
    writer.start()
    assert first_block_asked.wait(60)
    (temporary,) = files(tmp_path)
    assert ".tmp-" in temporary
    assert store.inventory().entries == ()
    rest.set()
    writer.join(30)

    assert whole(store) == [7]


def test_a_full_disk_says_so_and_leaves_the_older_snapshot(small_disk):
    store = open_store(str(small_disk))
    store.write(meta(1), Image(1))
    before = files(small_disk)
    with pytest.raises(LevelFull, match="free space there"):
        store.write(meta(2), Image(2, 100_000))

    assert files(small_disk) == before
    assert whole(store) == [1]


def test_a_disk_that_is_full_at_the_manifest_leaves_the_older_snapshot(small_disk):
    store = open_store(str(small_disk))
    store.write(meta(1), Image(1))
    before = files(small_disk)

    class FillsTheDisk(Image):
        def finish(self) -> None:
            room = os.statvfs(small_disk)
            (small_disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_bsize))

    with pytest.raises(LevelFull):
        store.write(meta(2), FillsTheDisk(2))

    (small_disk / "filler").unlink()
    assert files(small_disk) == before
    assert whole(store) == [1]
    store.write(meta(3), Image(3))
    assert whole(store) == [1, 3]


@pytest.mark.parametrize("where", ["parent is a file", "/proc"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, where):
    (tmp_path / "file").write_text("")
    url = str(tmp_path / "file" / "run") if where != "/proc" else "/proc/lazysnap"
    with pytest.raises(LevelUnavailable, match=url):
        open_store(url).write(meta(1), Image(1))


def test_a_directory_removed_between_two_snapshots_is_made_again(tmp_path):
    store = open_store(str(tmp_path / "run"))
    store.write(meta(1), Image(1))
    subprocess.run(["rm", "-r", tmp_path / "run"], check=True)
    store.write(meta(2), Image(2))

    assert whole(store) == [2]


def test_a_directory_removed_while_writing_fails_that_snapshot_only(tmp_path):
    class Removes(Image):
        def finish(self) -> None:
            subprocess.run(["rm", "-r", tmp_path / "run"], check=True)

    store = open_store(str(tmp_path / "run"))
    with pytest.raises(LevelUnavailable):
        store.write(meta(1), Removes(1))
    store.write(meta(2), Image(2))

    assert whole(store) == [2]


def test_foreign_files_and_half_snapshots_are_not_snapshots(tmp_path):
    store = open_store(str(tmp_path))
    store.write(meta(1), Image(1))
    for name in (
        "checkpoint-5/model.safetensors",
        f"{directory_of(9)}/node-00000-of-00001.safetensors",
        f"{directory_of(8)}/.nfs0001",
        "last.ckpt",
        f"{directory_of(7)}/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    assert whole(store) == [1]


def test_names_without_a_snapshot_go_when_they_are_old(a_day_later, store):
    for step in (1, 2):
        store.write(meta(step), Image(step))
        store.keep(store.inventory().entries[-1], f"at-{step}")
    directory = store.inventory().entries[0].location
    for name in store.storage.list(directory):
        if not name.startswith("keep-"):
            store.storage.delete(f"{directory}/{name}")

    assert store.sweep() == [f"{directory}/keep-at-1"]
    assert store.storage.list(directory) == []
    assert [entry.names for entry in store.inventory().entries] == [("at-2",)]


def test_a_small_file_of_a_try_goes_a_day_later(tmp_path, request):
    store, name = open_store(str(tmp_path)), probe_name()
    store.storage.put(name, b"lazysnap")
    store.storage.put(f"{name}0", b"somebody else's")

    assert store.sweep() == [], "it may go on"
    request.getfixturevalue("a_day_later")
    assert store.sweep() == [name]
    assert store.storage.list() == [f"{name}0"]


def test_what_looks_at_every_directory_tells_that_it_moves_and_ends_when_nobody_waits(store):
    for step in (1, 2, 3):
        store.write(meta(step), Image(step))
        store.keep(store.inventory().entries[-1], "best")
    moved = []

    store.sweep(beat=lambda: moved.append("sweep"))
    assert moved.count("sweep") >= 3

    def beat():
        moved.append("release")
        if moved.count("release") == 2:
            raise CaptureAborted("nobody waits")

    with pytest.raises(CaptureAborted):
        store.release(None, "best", beat)
    assert {entry.names for entry in store.inventory().entries} == {("best",)}
    assert len(store.release(None, "best")) == 3


def test_a_sweep_removes_what_dead_writers_left_and_nothing_else(tmp_path, a_day_later):
    store = open_store(str(tmp_path))
    store.write(meta(1), Image(1))
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

    gone = store.sweep(lambda name: name.node == 0)

    assert len(gone) == 2
    assert len(files(tmp_path)) == len(kept) + 2
    assert not (tmp_path / directory_of(3)).exists()
    assert whole(store) == [1]


CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
import snapshots as t
from lazysnap.levels import open_store
from lazysnap.levels.node_file import delete_files
store = open_store(sys.argv[1])
for step in range(1, 5):
    store.write(t.meta(step), t.Image(step))
    print(step, flush=True)
    for entry in store.inventory().entries:
        if entry.step <= step - 2:
            delete_files([store.place(entry)])
store.write(t.meta(4), t.Image(4))
"""


def run_child(root: pathlib.Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(root), str(pathlib.Path(__file__).parent)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_killed_at_any_point_of_a_write_or_a_deletion_what_was_committed_is_whole(tmp_path, sample):
    log = tmp_path / "points"
    assert run_child(tmp_path / "dry", LAZYSNAP_FAULT_LOG=str(log)).returncode == 0
    passed = log.read_text().splitlines()
    assert len(set(passed)) >= 10
    points = [f"{name}:{count}" for name in sorted(set(passed)) for count in sorted({1, passed.count(name)})]
    for point in sample.of(points):
        root = tmp_path / point
        child = run_child(root, LAZYSNAP_FAULT=f"{point}:kill")
        assert child.returncode == -signal.SIGKILL, child.stderr
        committed = [int(line) for line in child.stdout.split()]
        store = open_store(str(root))

        steps = whole(store)

        assert set(committed[-2:]) <= set(steps), f"{point}: {committed} were committed, {steps} are whole"
        store.sweep()
        assert [entry.step for entry in store.inventory().entries] == whole(store)
        assert not [path for path in files(root) if ".tmp-" in path]
        assert store.inventory().problems == ()
