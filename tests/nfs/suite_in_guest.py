"""The suites over a directory of an NFS mount; the guest runs them, see ``test_suite``."""

import os
import pathlib
import shutil
import uuid

import pytest
from contract import BreakageContract, StorageContract, StoreContract
from support.place import Place

from lazysnap.levels.local import LocalStorage


class Nfs(Place):
    @pytest.fixture
    def make_storage(self):
        root = pathlib.Path(os.environ["LAZYSNAP_TEST_DIRECTORY"], uuid.uuid4().hex)
        yield lambda name="run": LocalStorage(str(root / name))
        shutil.rmtree(root, ignore_errors=True)

    @pytest.fixture
    def elsewhere(self, storage):
        return f"open_storage({storage.url!r})"


class TestStorage(Nfs, StorageContract):
    pass


class TestStore(Nfs, StoreContract):
    pass


class TestBreakage(Nfs, BreakageContract):
    every = int(os.environ["LAZYSNAP_TEST_EVERY"])
