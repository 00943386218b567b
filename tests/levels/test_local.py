"""Local files against other processes, dying processes, and file systems that fail or lack something."""

import contextlib
import ctypes
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from refused_calls import needs_seccomp
from snapshots import Image, files, meta, mount, whole
from support.catalogue import inventory_of
from support.image import write_shard

from lazysnap.errors import LevelError
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.store import open_storage

HERE = pathlib.Path(__file__).parent
SHARD = "step-00000001/shard"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Child:
    """``local_child.py``; ends with the test."""

    def __init__(self, command: str, root: object, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "local_child.py"), command, str(root), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def end(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def child():
    with contextlib.ExitStack() as stack:

        def start(command: str, root: object, *arguments: str, **environment: str) -> Child:
            started = Child(command, root, *arguments, **environment)
            stack.callback(started.end)
            return started

        yield start


@pytest.fixture
def open_to_all():
    """A directory that other users can reach."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="lazysnap-test-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(str(tmp_path / "run"))


def temporary(storage: LocalStorage) -> list[str]:
    return [name for name in files(pathlib.Path(storage.url)) if ".tmp-" in name]


# -------------------------------------------------------------------------------------------------- names


@pytest.mark.slow
def test_of_several_writers_of_one_name_each_has_its_turn_and_the_last_stands_whole(storage, child):
    rounds = 20
    writers = {name: child("contend", storage.url, name * 1000, str(rounds)) for name in "abc"}
    for writer in writers.values():
        assert writer.line() == "ready"
    for writer in writers.values():
        writer.go()
    for writer in writers.values():
        assert writer.line() == "done"

    for number in range(rounds):
        assert storage.get(f"{number}/shard") in [name.encode() * 1000 for name in "abc"]
    assert temporary(storage) == []


def test_a_rename_whose_answer_was_lost_is_recognised_as_done(storage, monkeypatch):
    rename = os.rename

    def twice(source: str, target: str) -> None:
        rename(source, target)
        rename(source, target)  # what an NFS client does that got no answer

    monkeypatch.setattr(os, "rename", twice)
    storage.put(SHARD, b"mine")

    assert storage.get(SHARD) == b"mine"
    assert temporary(storage) == []


def test_a_writer_that_fails_after_the_rename_takes_the_name_back(storage, monkeypatch):
    writer = storage.create(SHARD, 4)
    writer.write(0, memoryview(b"mine"))
    fsync = os.fsync

    def of_directories(handle: int) -> None:
        if os.path.exists(os.path.join(storage.url, SHARD)):
            raise OSError(5, "injected")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", of_directories)
    with pytest.raises(LevelError):
        writer.publish()
    writer.close()

    assert files(pathlib.Path(storage.url)) == []


@pytest.mark.slow
@needs_seccomp
@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
def test_a_quota_or_full_disk_at_the_first_byte_is_called_full(storage, child, error):
    writer = child("snapshots", storage.url, f"refuse=fallocate:{error}")

    assert writer.line().startswith("LevelError")
    assert files(pathlib.Path(storage.url)) == []


@needs_seccomp
def test_a_quota_that_ends_in_the_middle_of_a_write_is_called_full(storage, child):
    writer = child("snapshots", storage.url, "refuse=pwrite64:EDQUOT")

    assert writer.line().startswith("LevelError")
    assert files(pathlib.Path(storage.url)) == []


@needs_seccomp
def test_where_space_cannot_be_reserved_nothing_is_written_for_it(storage, child):
    assert int(child("blocks", storage.url, "refuse=fallocate:EOPNOTSUPP").line()) == 0


# --------------------------------------------------------------------------------------------- broken places


@needs_seccomp
def test_after_an_fsync_that_failed_nothing_is_published(storage, child):
    writer = child("snapshots", storage.url, "refuse=fdatasync:EIO")

    answer = writer.line()
    assert answer.startswith("LevelError")
    assert "the disk failed" in answer
    assert files(pathlib.Path(storage.url)) == []


@pytest.mark.slow
def test_an_fsync_that_failed_is_not_tried_again_on_the_same_file(storage, child):
    writer = child("publish_twice", storage.url, LAZYSNAP_FAULT="level.local.sync:1:raise")

    assert "injected at level.local.sync" in writer.line()
    assert "failed before" in writer.line()
    writer.process.wait(60)
    assert files(pathlib.Path(storage.url)) == []


@pytest.fixture
def tmpfs(tmp_path):
    path = tmp_path / "tmpfs"
    mount(path, "8m")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_read_only_remount_costs_the_snapshots_until_it_is_undone(tmpfs):
    store = open_storage(str(tmpfs / "run"))
    write_shard(store, meta(1), Image(1))
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    with pytest.raises(LevelError, match=r"creating step-00000002-.*Read-only.*remount it"):
        write_shard(store, meta(2), Image(2))
    assert whole(store) == [1]
    subprocess.run(["mount", "-o", "remount,rw", tmpfs], check=True)
    write_shard(store, meta(3), Image(3))

    assert whole(store) == [1, 3]


@pytest.fixture
def disk(tmp_path):
    """An ext4 file system of its own, that can be mounted again."""
    if os.geteuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    image, path = tmp_path / "image", tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    path.mkdir()
    attach = ["mount", "-o", "loop", image, path]
    if subprocess.run(attach, capture_output=True, check=False).returncode:
        pytest.skip("no loop devices here")
    yield path, attach
    subprocess.run(["umount", path], check=True)


def test_a_disk_that_dies_in_the_middle_of_a_write_loses_that_snapshot_only(disk):
    path, attach = disk
    store = open_storage(str(path / "run"))
    write_shard(store, meta(1), Image(1))

    class Dies(Image):
        def finish(self) -> None:
            handle = os.open(path, os.O_RDONLY)
            fcntl.ioctl(handle, 0x8004587D, bytes([2, 0, 0, 0]))  # EXT4_IOC_SHUTDOWN, without writing the journal
            os.close(handle)

    with pytest.raises(LevelError, match=r"the disk failed|read-only"):
        write_shard(store, meta(2), Dies(2, 200_000))
    subprocess.run(["umount", path], check=True)
    subprocess.run(attach, check=True)

    assert whole(store) == [1]
    assert inventory_of(store).problems == ()
    sweep(store)
    write_shard(store, meta(2), Image(2))
    assert whole(store) == [1, 2]


@pytest.mark.slow
@needs_root
def test_the_directory_above_a_level_need_not_be_readable(open_to_all, child):
    """Else a level that failed once would never pass a probe."""
    parent = open_to_all / "closed"
    run = parent / "run"
    run.mkdir(parents=True)
    os.chown(run, NOBODY, NOBODY)
    parent.chmod(0o711)

    assert child("small", run, f"uid={NOBODY}").line() == "written"


@pytest.mark.slow
@needs_root
def test_rights_lost_in_the_middle_of_a_run_are_named_and_come_back(open_to_all, child):
    run = open_to_all / "run"
    writer = child("snapshots", run, f"uid={NOBODY}")
    assert writer.line() == "committed 1"
    run.chmod(0o555)
    os.chown(run, 0, 0)
    writer.go()
    answer = writer.line()
    assert answer.startswith("LevelError")
    assert f"owner and mode of the directory for user {NOBODY}" in answer
    run.chmod(0o777)
    writer.go()

    assert writer.line() == "committed 3"
    assert whole(open_storage(str(run))) == [1, 3]


@needs_root
@pytest.mark.parametrize("below", ["", "level"])
def test_a_file_where_a_directory_has_to_be_is_named_with_what_to_do(tmp_path, below):
    (tmp_path / "file").touch()
    store = open_storage(str(tmp_path / "file" / below))
    for work in (lambda: inventory_of(store), lambda: write_shard(store, meta(1), Image(1))):
        with pytest.raises(LevelError, match=r"Not a directory: .*; a file is where a directory has to be: move it"):
            work()


def test_a_mount_whose_server_is_gone_says_so_and_is_taken_up_again(tmp_path):
    store = open_storage(str(tmp_path / "mount" / "run"))
    write_shard(store, meta(1), Image(1))
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE here")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    failed = ctypes.CDLL(None).mount(b"lazysnap", os.fsencode(tmp_path / "mount"), b"fuse", 0, options.encode())
    os.close(server)  # from here on: ENOTCONN
    if failed:
        pytest.skip("mounting FUSE is not allowed here")
    try:
        with pytest.raises(LevelError, match="what serves this mount is gone: unmount it"):
            write_shard(store, meta(2), Image(2))
        with pytest.raises(LevelError, match="what serves this mount is gone"):
            inventory_of(store)
    finally:
        subprocess.run(["umount", "-l", tmp_path / "mount"], check=True)
    write_shard(store, meta(3), Image(3))

    assert whole(store) == [1, 3]


# ---------------------------------------------------------------------------------- what NFS leaves behind


def test_names_that_nfs_gives_to_deleted_open_files_are_not_seen(storage):
    storage.put(SHARD, b"x")
    left = pathlib.Path(storage.url) / "step-00000001" / ".nfs00000000002100c800000001"
    left.write_bytes(b"deleted")
    assert storage.list("step-00000001") == ["shard"]

    storage.delete(SHARD)
    storage.delete_directory("step-00000001")

    assert left.exists()
    assert storage.list("step-00000001") == []
    left.unlink()
    storage.delete_directory("step-00000001")
    assert storage.list() == []


def test_a_directory_that_a_program_removed_with_all_around_it_is_not_made_again(tmp_path):
    """Nor does a removal meet a directory that fills again behind it."""
    root = tmp_path / "run"
    storage = LocalStorage(str(root / "lazysnap"))
    storage.put("one/a", b"a")
    writer = storage.create("two/b", 4096)
    shutil.rmtree(root)
    with pytest.raises(LevelError):
        writer.publish()
    writer.close()
    for _ in range(2):
        with pytest.raises(LevelError, match="No such file"):
            storage.put("three/c", b"c")
        assert not root.exists()

    root.mkdir()
    storage.put("four/d", b"d")
    assert storage.get("four/d") == b"d"
