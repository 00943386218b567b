"""The suite that every storage must pass."""

from lazysnap.testing.objects import ObjectContract
from lazysnap.testing.writers import WriterContract


class StorageContract(ObjectContract, WriterContract):
    """What ``levels.storage.Storage`` promises, as tests. Subclass it, and say how clients are made::

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def make_storage(self, tmp_path):
            return lambda name="run": MyStorage(f"{tmp_path}/{name}")
    """
