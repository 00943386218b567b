"""Places to run the published suites over: clients of each, empty before the test and gone after it."""

import os
import shutil
import subprocess
import tempfile

import fsspec
import pytest

from lazysnap.levels.local import LocalStorage
from lazysnap.levels.remote import FsspecStorage
from lazysnap.testing import Place


class Disk(Place):
    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path / "with space, é and %41")

    @pytest.fixture
    def make_storage(self, root):
        return lambda name="run": LocalStorage(os.path.join(root, name))

    @pytest.fixture
    def elsewhere(self, storage):
        return f"open_store({storage.url!r}).storage"


class Tmpfs(Disk):
    @pytest.fixture
    def root(self):
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no tmpfs at /dev/shm that can be written")
        root = tempfile.mkdtemp(prefix="lazysnap-test-", dir="/dev/shm")
        yield root
        shutil.rmtree(root)

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


class Memory(Place):
    """fsspec's ``memory://``: no other process sees it, and age is all that it knows of a writer."""

    notices_death = False

    @pytest.fixture
    def make_storage(self, tmp_path):
        yield lambda name="run": FsspecStorage(f"memory://{tmp_path.name}/{name}")
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{tmp_path.name}"):
            memory.rm(f"/{tmp_path.name}", recursive=True)
