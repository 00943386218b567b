"""Frozen tensors that are damaged at a level: found by whoever reads them, written again where they are missing."""

import pathlib
import signal

import pytest
from deaths import run_forks
from frozen_damage import NOTICED, damage, frozen_at, restorable
from snapshots import files
from support.catalogue import inventory_of
from support.snapshots import Snapshot

from lazysnap.levels.local import LocalStorage
from lazysnap.levels.source import shard_of
from lazysnap.levels.store import SnapshotStore, open_store
from lazysnap.shard.manifest import FrozenReference

pytestmark = pytest.mark.slow

BASE = Snapshot(0, elements=300_000)


def with_base(step, base=BASE):
    return Snapshot(step, frozen=FrozenReference(base.digest, len(base.image)))


def write_base(store, base=BASE):
    return store.write_frozen(shard_of(base.meta, base.source()), base.source(), base.digest)


class CountingStorage(LocalStorage):
    """Counts the bytes that are read of images."""

    read_bytes = 0

    def reader(self, path):
        if path.startswith("frozen-"):
            self.read_bytes += self.size(path)
        return super().reader(path)


@pytest.fixture
def url(tmp_path):
    url = str(tmp_path / "level")
    store = open_store(url)
    write_base(store)
    with_base(1).write(store)
    return url


@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize("how", NOTICED)
def test_what_is_found_damaged_is_not_there_and_is_written_again(tmp_path, how, knows):
    url = str(tmp_path / "level")
    store = open_store(url)
    write_base(store)
    with_base(1).write(store)
    assert store.has_frozen(BASE.digest)
    damage(url, how)
    assert restorable(url) == []
    store = store if knows else open_store(url)

    assert not store.has_frozen(BASE.digest)
    write_base(store)
    with_base(2).write(store)

    assert store.has_frozen(BASE.digest)
    assert restorable(url) == [1, 2]
    assert len(files(pathlib.Path(url))) == 6


def test_frozen_tensors_that_a_manifest_confirms_are_not_read_however_many_snapshots_refer_to_them(url):
    storage = CountingStorage(url)
    store = SnapshotStore(storage)
    for step in range(2, 12):
        assert store.has_frozen(BASE.digest)
        with_base(step).write(store)
    assert storage.read_bytes == 0


@pytest.mark.parametrize("how", NOTICED)
def test_what_another_job_has_put_there_since_the_damage_was_seen_stays(url, how):
    slow = open_store(url)
    assert slow.has_frozen(BASE.digest)
    damage(url, how)
    write_base(open_store(url))
    inodes = [path.stat().st_ino for path in sorted(frozen_at(url).iterdir())]

    write_base(slow)

    assert [path.stat().st_ino for path in sorted(frozen_at(url).iterdir())] == inodes
    assert restorable(url) == [1]


def test_at_an_object_store_frozen_tensors_are_looked_at_by_size_and_manifest(tmp_path):
    url = f"memory://{tmp_path.name}/images"
    store = open_store(url)
    write_base(store)
    with_base(1).write(store)
    (image,) = inventory_of(store).frozen
    place = store.place(image)
    whole = {path: store.storage.get(path) for path in (place.file_path, place.manifest_path)}
    for path, data in whole.items():
        for bad in (data[:-1], None):
            assert store.has_frozen(BASE.digest)
            store.storage.delete(path) if bad is None else store.storage.put(path, bad)
            assert not store.has_frozen(BASE.digest)
            write_base(store)
            assert restorable(url) == [1]
    store.storage._filesystem().rm(f"/{tmp_path.name}", recursive=True)


def work(root):
    """Replace what is damaged there."""
    store = open_store(root)
    assert not store.has_frozen(BASE.digest)
    write_base(store)
    assert store.has_frozen(BASE.digest)
    with_base(2).write(store)


@pytest.mark.parametrize("how", ["the shard is truncated", "a bit of the manifest is flipped"])
def test_killed_at_any_point_of_a_replacement_they_are_whole_or_not_there(tmp_path, how):
    def prepare(name):
        store = open_store(str(tmp_path / name))
        write_base(store)
        with_base(1).write(store)
        damage(tmp_path / name, how)
        return tmp_path / name

    log = tmp_path / "points"
    assert run_forks("test_frozen_at_levels", [(prepare("dry"), "", log)]) == [0]
    passed = log.read_text().splitlines()
    first_change = passed.index("level.local.renamed")
    points = sorted({(name, count) for name in passed for count in (1, passed.count(name))})
    roots = {point: prepare("{}-{}".format(*point)) for point in points}
    cases = [(root, "{}:{}:kill".format(*point), "") for point, root in roots.items()]
    ends = run_forks("test_frozen_at_levels", cases)
    assert ends == [-signal.SIGKILL] * len(points)
    for (name, count), root in roots.items():
        where = f"{name}:{count}"
        store = open_store(str(root))
        nth = [index for index, passed_name in enumerate(passed) if passed_name == name][count - 1]
        if nth >= first_change:
            images = [store.verify(store.place(image)) for image in inventory_of(store).frozen]
            assert images or not [entry for entry in inventory_of(store).entries if entry.step == 2], where

        store.sweep()
        write_base(store)
        with_base(3).write(store)

        assert {1, 3} <= set(restorable(str(root))), where
        assert inventory_of(store).problems == (), where
        assert not [path for path in files(root) if ".tmp-" in path], where
