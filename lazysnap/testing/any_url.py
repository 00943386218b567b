"""The suites over any place that lazysnap can open::

    LAZYSNAP_TEST_URL=s3://bucket/prefix pytest --pyargs lazysnap.testing.any_url

Below that URL a directory of its own is made for each test, and removed. Further variables:

* ``LAZYSNAP_TEST_OPTIONS``: ``PersistentLevel.storage_options`` as JSON.
* ``LAZYSNAP_TEST_WITHOUT``: what the place cannot do, any of ``exclusive leases death processes`` (``testing.Place``).
* ``LAZYSNAP_TEST_EVERY``: break every n-th operation only, where requests are slow.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from lazysnap.config import resolve_url
from lazysnap.levels import open_store
from lazysnap.levels.storage import Storage
from lazysnap.testing.breakage import BreakageContract
from lazysnap.testing.contract import StorageContract
from lazysnap.testing.place import MakeStorage, Place
from lazysnap.testing.stores import StoreContract

if "LAZYSNAP_TEST_URL" not in os.environ:
    pytest.skip("set LAZYSNAP_TEST_URL to the path or URL to be tested", allow_module_level=True)

URL = resolve_url(os.environ["LAZYSNAP_TEST_URL"])
OPTIONS = json.loads(os.environ.get("LAZYSNAP_TEST_OPTIONS", "{}"))
WITHOUT = set(os.environ.get("LAZYSNAP_TEST_WITHOUT", "").replace(",", " ").split())
IS_LOCAL = not urlsplit(URL).scheme


def remove(make: Callable[[str], Storage], names: set[str]) -> None:
    """Take away all that a test made: objects, directories, and their root."""
    for name in names:
        storage = make(name)
        for directory in storage.list():
            for child in storage.list(directory):
                storage.delete(f"{directory}/{child}")
            storage.delete_directory(directory)
            if directory in storage.list():
                storage.delete(directory)
        storage.delete_directory("")
    make("").delete_directory("")


class AnyUrl(Place):
    """The place at ``LAZYSNAP_TEST_URL``."""

    is_exclusive = "exclusive" not in WITHOUT
    has_leases = "leases" not in WITHOUT
    notices_death = IS_LOCAL and "death" not in WITHOUT

    @pytest.fixture
    def make_storage(self) -> Iterator[MakeStorage]:
        """Clients of a directory of its own."""
        root = f"{URL}/lazysnap-test-{uuid.uuid4().hex}"
        names = set()

        def make(name: str = "run") -> Storage:
            names.add(name)
            return open_store(f"{root}/{name}".rstrip("/"), options=OPTIONS).storage

        yield make
        remove(make, names - {""})

    @pytest.fixture
    def elsewhere(self, storage: Storage) -> str | None:
        """The same URL, opened there."""
        if "processes" in WITHOUT or URL.startswith("memory:"):
            return None
        return f"open_store({storage.url!r}, options={OPTIONS!r}).storage"


class TestStorage(AnyUrl, StorageContract):
    """The storage."""


class TestStore(AnyUrl, StoreContract):
    """Snapshots kept there."""


class TestBreakage(AnyUrl, BreakageContract):
    """Snapshots kept there while it breaks."""

    every = int(os.environ.get("LAZYSNAP_TEST_EVERY", "1"))
