"""The suites over every storage: a real disk, a tmpfs, fsspec's ``memory://``, a real S3 server on loopback."""

import os
import shutil
import subprocess
import tempfile
import uuid

import fsspec
import pytest
import seaweed
from support.place import Place

from contract import BreakageContract, StorageContract, StoreContract
from lazysnap.levels.fsspec_storage import FsspecStorage
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.store import open_storage
from lazysnap.levels.watched import WatchedStorage


class Disk(Place):
    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path / "with space, é and %41")

    @pytest.fixture
    def make_storage(self, root):
        return lambda name="run": LocalStorage(os.path.join(root, name))

    @pytest.fixture
    def elsewhere(self, storage):
        return f"open_storage({storage.url!r})"

    @pytest.fixture
    def read_only(self, storage, tmp_path):
        os.makedirs(storage.url)
        view = tmp_path / "read only"
        view.mkdir()
        for command in (["mount", "--bind", storage.url, view], ["mount", "-o", "remount,bind,ro", view]):
            if subprocess.run(command, capture_output=True, check=False).returncode:
                subprocess.run(["umount", view], capture_output=True, check=False)
                pytest.skip("mounting needs root")
        yield LocalStorage(str(view))
        subprocess.run(["umount", view], check=True)


class Watched(Disk):
    """As a job of a level sees a disk."""

    @pytest.fixture
    def make_storage(self, root):
        return lambda name="run": WatchedStorage(LocalStorage(os.path.join(root, name)), lambda: None)


class Tmpfs(Disk):
    """The code is that of a disk: it is here to break every operation, which is slow on one."""

    @pytest.fixture
    def root(self):
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no tmpfs at /dev/shm that can be written")
        root = tempfile.mkdtemp(prefix="lazysnap-test-", dir="/dev/shm")
        yield root
        shutil.rmtree(root)


class Memory(Place):
    """No other process sees it, and age is all that it knows of a writer."""

    notices_death = False
    keeps_open_files = False

    @pytest.fixture
    def make_storage(self, tmp_path):
        yield lambda name="run": FsspecStorage(f"memory://{tmp_path.name}/{name}")
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{tmp_path.name}"):
            memory.rm(f"/{tmp_path.name}", recursive=True)


class S3(Place):
    notices_death = False
    keeps_open_files = False

    @pytest.fixture
    def root(self):
        return f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}"

    @pytest.fixture
    def make_storage(self, s3_server, root):
        return lambda name="run": open_storage(f"{root}/{name}", options=s3_server.options())

    @pytest.fixture
    def elsewhere(self, storage, s3_server):
        return f"open_storage({storage.url!r}, options={s3_server.options()!r})"

    @pytest.fixture
    def read_only(self, storage, s3_server):
        return open_storage(storage.url, options=s3_server.options(seaweed.READER))


@pytest.mark.slow
class TestDisk(Disk, StorageContract, StoreContract):
    pass


@pytest.mark.slow
class TestWatched(Watched, StorageContract):
    pass


@pytest.mark.slow
class TestMemory(Memory, StorageContract, StoreContract):
    pass


@pytest.mark.slow
class TestS3(S3, StorageContract):
    """Snapshots at S3 are in tests/levels and tests/cli."""


@pytest.mark.slow
class TestTmpfsBreaks(Tmpfs, BreakageContract):
    pass


@pytest.mark.slow
class TestMemoryBreaks(Memory, BreakageContract):
    """As any place that does not notice the death of a writer, as S3: what breaks there is in tests/levels."""

    every = 2
