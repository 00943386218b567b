"""The published suites over S3: a real server on loopback, which takes its time."""

import os
import uuid

import pytest
import seaweed

from lazysnap.levels import open_store
from lazysnap.testing import BreakageContract, Place, StorageContract, StoreContract

pytestmark = pytest.mark.slow


class S3(Place):
    notices_death = False

    @pytest.fixture
    def root(self):
        return f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}"

    @pytest.fixture
    def make_storage(self, s3_server, root):
        return lambda name="run": open_store(f"{root}/{name}", options=s3_server.options()).storage

    @pytest.fixture
    def elsewhere(self, storage, s3_server):
        return f"open_store({storage.url!r}, options={s3_server.options()!r}).storage"

    @pytest.fixture
    def read_only(self, storage, s3_server):
        return open_store(storage.url, options=s3_server.options(seaweed.READER)).storage


class TestS3(S3, StorageContract, StoreContract):
    pass


class TestS3Breaks(S3, BreakageContract):
    every = int(os.environ.get("LAZYSNAP_TEST_EVERY", "20"))
