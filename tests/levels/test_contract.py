"""The published suites, over every place that runs here."""

import os
import shutil
import tempfile

import fsspec
import pytest

from lazysnap.levels.local import LocalStorage
from lazysnap.levels.remote import FsspecStorage
from lazysnap.testing import StorageContract


class TestDisk(StorageContract):
    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path / "with space, é and %41")

    @pytest.fixture
    def make_storage(self, root):
        return lambda name="run": LocalStorage(os.path.join(root, name))

    @pytest.fixture
    def elsewhere(self, storage):
        return f"open_store({storage.url!r}).storage"


class TestTmpfs(TestDisk):
    @pytest.fixture
    def root(self):
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no tmpfs at /dev/shm that can be written")
        root = tempfile.mkdtemp(prefix="lazysnap-test-", dir="/dev/shm")
        yield root
        shutil.rmtree(root)


class TestMemory(StorageContract):
    """fsspec's ``memory://``: no other process sees it."""

    @pytest.fixture
    def make_storage(self, tmp_path):
        root = f"memory://{tmp_path.name}"
        yield lambda name="run": FsspecStorage(f"{root}/{name}")
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True) if fsspec.filesystem("memory").exists(
            f"/{tmp_path.name}"
        ) else None
