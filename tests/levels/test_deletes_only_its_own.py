"""Nothing that lazysnap did not write is deleted, and nothing that somebody is just bringing."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from snapshots import OTHER, RUN, Image, files, meta, whole
from support.catalogue import inventory_of
from support.image import write_shard
from support.names import directory_of
from support.place import write_object

from lazysnap.cli import main
from lazysnap.errors import ConfigError, LevelError
from lazysnap.levels.fsspec_storage import FsspecStorage
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.node_file import FilePlace, delete_files
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import keep, open_storage, release

SHARD, MANIFEST = "node-00000-of-00001.safetensors", "node-00000-of-00001.json"


def content(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in files(root)}


@pytest.fixture
def level(tmp_path):
    root = tmp_path / "run"
    store = open_storage(str(root))
    for step in (1, 2, 3):
        write_shard(store, meta(step), Image(step))
    return root


# ------------------------------------------------------------------------------------------- symbolic links


@pytest.fixture
def linked(level, tmp_path):
    """Step 1, and garbage of step 4, lie elsewhere; the level has symbolic links to them."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(level / directory_of(1), elsewhere / "kept")
    (level / directory_of(1)).symlink_to(elsewhere / "kept", target_is_directory=True)
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / SHARD).write_bytes(b"x")
    (elsewhere / "mine" / f".{SHARD}.tmp-1-0123abcd").write_bytes(b"x")
    (level / directory_of(4)).symlink_to(elsewhere / "mine", target_is_directory=True)
    return elsewhere


def test_a_deletion_does_not_go_through_a_link(level, linked):
    before = content(linked)
    store = open_storage(str(level))

    went = [entry.step for entry in inventory_of(store).entries if delete_files([FilePlace.of(store, entry)])]
    assert sorted(went) == [2, 3]
    assert content(linked) == before
    assert (level / directory_of(1)).is_symlink()
    assert whole(store) == [1]


@pytest.mark.usefixtures("a_day_later")
def test_a_sweep_does_not_delete_through_a_link(level, linked):
    before = content(linked)
    assert sweep(open_storage(str(level))) == []
    assert content(linked) == before
    assert (level / directory_of(4)).is_symlink()


def test_a_storage_neither_deletes_nor_writes_through_a_link(level, linked):
    before = content(linked)
    storage = open_storage(str(level))
    for path in (f"{directory_of(1)}/{SHARD}", f"{directory_of(4)}/{SHARD}"):
        with pytest.raises(Exception, match="deleting"):
            storage.delete(path)
        assert not storage.delete_abandoned(path)
    with pytest.raises(LevelError, match="symbolic link"):
        storage.create(f"{directory_of(4)}/node-00000-of-00002.safetensors", 10)
    with pytest.raises(LevelError, match="symbolic link"):
        storage.put(f"{directory_of(1)}/keep-best", RUN.encode())
    storage.delete_directory(directory_of(4))
    assert content(linked) == before
    with pytest.raises(LevelError, match="symbolic link"):
        write_shard(open_storage(str(level)), meta(4), Image(4))
    assert content(linked) == before
    assert whole(open_storage(str(level))) == [1, 2, 3]


@pytest.mark.usefixtures("a_day_later")
def test_prune_does_not_delete_through_a_link(level, linked):
    before = content(linked)

    assert main(["prune", str(level), "--keep-last", "1", "--yes"]) == 0

    assert content(linked) == before
    assert whole(open_storage(str(level))) == [1, 3]


# ------------------------------------------------------------------------------------------- foreign files


@pytest.mark.usefixtures("a_day_later")
@pytest.mark.parametrize(
    "path",
    [
        f"{directory_of(12)}/keep-notes",
        f"{directory_of(12)}/notes.txt",
        f"{directory_of(12)}/{SHARD}.txt",
        f"{directory_of(12)}/.{SHARD}.a1B2c3",  # as rsync calls it
        f"{directory_of(12)}/.{SHARD}.tmp-mine",
        f"{directory_of(12)}/.{SHARD}.tmp-1-0123abcd.bak",
        f"{directory_of(12)}/.notes.tmp-1-0123abcd",
        f"{directory_of(12)}/rank-0-of-1.safetensors",
        f"{directory_of(12)}/node-00003-of-00002.safetensors",
        f"{directory_of(12)}/node-0000000000-of-0000000001.safetensors",
        f"{directory_of(12)}/rank-\u0660\u0660\u0660\u0660\u0660-of-\u0660\u0660\u0660\u0660\u0661.safetensors",
        f"{directory_of(12)}/.nfs000000000021",
        f"{directory_of(12)}/.nfs.tmp-1-0123abcd",
        f"{directory_of(12).replace('-0', '-00', 1)}/{SHARD}",
        f"{directory_of(12).replace('00000012', 20 * '9')}/{SHARD}",
        f"{directory_of(12).replace('00000012', 8 * chr(0x661))}/{SHARD}",
        f"step-{12:08d}/{SHARD}",
        f"{directory_of(12).upper()}/{SHARD}",
        f"{directory_of(12)[:-1]}/{SHARD}",
        f"{directory_of(12)}.bak/{SHARD}",
        f"frozen-mine/{SHARD}",
        f"{SHARD}",
    ],
)
def test_a_file_of_another_name_or_content_stays(level, path):
    file = level / path
    file.parent.mkdir(exist_ok=True)
    file.write_text("years of work")
    store = open_storage(str(level))

    assert sweep(store) == []
    release(store, None, "notes")
    assert file.read_text() == "years of work"


def test_a_name_that_no_run_gave_is_neither_taken_away_nor_written_over(level):
    notes = level / directory_of(3) / "keep-notes"
    notes.write_text("years of work")
    store = open_storage(str(level))
    entry = next(entry for entry in inventory_of(store).entries if entry.step == 3)
    assert entry.names == ("notes",)  # in doubt it protects

    assert release(store, None, "notes") == []
    with pytest.raises(ConfigError, match="keep-notes"):
        keep(store, entry.snapshot, "notes")
    assert notes.read_text() == "years of work"
    keep(store, entry.snapshot, "best")
    keep(store, entry.snapshot, "best")
    assert release(store, None, "best") == [directory_of(3)]


# ------------------------------------------------------------------------------------------- what is on its way


@pytest.mark.parametrize("order", [[SHARD, MANIFEST], [MANIFEST, SHARD], ["keep-best", SHARD, MANIFEST]], ids=str)
@pytest.mark.parametrize("run", [RUN, OTHER])
def test_a_snapshot_that_is_copied_into_a_level_while_a_job_starts_arrives(level, tmp_path, order, run):
    """As ``cp -a`` and ``rsync -a`` do it: file by file, each with the time of its original."""
    other = open_storage(str(tmp_path / "other"))
    write_shard(other, meta(9, run), Image(9))
    if "keep-best" in order:
        keep(other, inventory_of(other).entries[0].snapshot, "best")
    source, target = tmp_path / "other" / directory_of(9, run), level / directory_of(9, run)
    for file in source.iterdir():
        os.utime(file, (1, 1))
    store = open_storage(str(level))

    target.mkdir()
    for name in order:
        assert sweep(store) == []
        assert target.is_dir()
        temporary = target / f".{name}.Xy12Za"
        shutil.copy2(source / name, temporary)
        assert sweep(store) == []
        temporary.rename(target / name)
    assert sweep(store) == []
    assert 9 in whole(store, run)


class Replaced(LocalStorage):
    """A writer publishes a file while a sweep looks whether the old one is committed."""

    def _path_exists(self, path):
        write_object(LocalStorage(self.url), f"{directory_of(9)}/{SHARD}", b"new")
        return super()._path_exists(path)


def test_a_file_that_a_writer_has_just_replaced_is_not_swept(level):
    path = f"{directory_of(9)}/{SHARD}"
    write_object(LocalStorage(str(level)), path, b"old")

    assert not Replaced(str(level)).delete_abandoned(path, unless=f"{directory_of(9)}/{MANIFEST}")

    assert (level / path).read_bytes() == b"new"


def test_what_does_not_change_for_a_day_is_nobodys(level, monkeypatch):
    directory = level / directory_of(9)
    directory.mkdir()
    (directory / SHARD).write_bytes(b"x")
    named = level / directory_of(10)
    named.mkdir()
    (named / "keep-best").write_text(RUN)
    (level / directory_of(11)).mkdir()
    store = open_storage(str(level))
    assert sweep(store) == []
    monkeypatch.setattr(Storage, "abandoned_after_s", -1.0)
    assert sweep(store) == [f"{directory_of(9)}/{SHARD}", f"{directory_of(10)}/keep-best"]
    assert sorted(path.name for path in level.iterdir()) == [directory_of(step) for step in (1, 2, 3)]


CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
import snapshots as t
from support.image import write_shard
from support.names import directory_of
from lazysnap.levels.store import open_storage
write_shard(open_storage(sys.argv[1]), t.meta(9), t.Image(9))
"""


def killed_at(point, level):
    """A writer of step 9 that did not come further."""
    words = [sys.executable, "-c", CHILD, str(level), str(Path(__file__).parent)]
    done = subprocess.run(words, env={**os.environ, "LAZYSNAP_FAULT": f"{point}:1:kill"}, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("point", ["level.local.renamed", "level.local.published", "level.store.commit"])
def test_what_a_killed_writer_published_and_did_not_commit_goes_after_a_day(level, point, monkeypatch):
    """A day in which it might be somebody's copy on its way."""
    before = content(level)
    killed_at(point, level)
    assert (level / directory_of(9) / SHARD).exists()

    store = open_storage(str(level))
    assert sweep(store) == []
    assert whole(store) == [1, 2, 3]
    monkeypatch.setattr(Storage, "abandoned_after_s", -1.0)
    assert sweep(store) == [f"{directory_of(9)}/{SHARD}"]
    assert content(level) == before


@pytest.mark.slow
def test_what_a_killed_writer_did_not_publish_goes_at_once(level):
    before = content(level)
    killed_at("level.local.write", level)
    (gone,) = sweep(open_storage(str(level)))
    assert gone.startswith(f"{directory_of(9)}/.{SHARD}.tmp-")
    assert content(level) == before


def test_a_copy_beside_what_a_killed_writer_half_wrote_stays(level):
    directory = level / directory_of(9)
    directory.mkdir()
    (directory / f".{SHARD}.tmp-1-0123abcd").write_bytes(b"half")
    (directory / SHARD).write_bytes(b"somebody's copy")
    assert sweep(open_storage(str(level))) == [f"{directory_of(9)}/.{SHARD}.tmp-1-0123abcd"]
    assert (directory / SHARD).read_bytes() == b"somebody's copy"


@pytest.mark.parametrize("url", ["memory://deletes-{}/run", "objects://deletes-{}/run"])
def test_an_object_that_is_copied_there_stays_for_a_day_by_the_clock_of_the_place(url, tmp_path, monkeypatch):
    from drivers import ObjectStore

    url = url.format(tmp_path.name)
    monkeypatch.setattr(ObjectStore, "clock_s", -90_000.0)  # a server more than a day behind
    storage = FsspecStorage(url)
    path = f"{directory_of(9)}/{SHARD}"
    storage.put(path, b"somebody's copy")

    assert sweep(FsspecStorage(url)) == []
    assert storage.get(path) == b"somebody's copy"
    storage.abandoned_after_s = -1.0
    assert sweep(storage) == [path]
