"""The suite that every storage must pass, and the one over a storage that breaks.

A storage is tested by a class that inherits from the suites and overrides the fixtures of ``support.place.Place``.
"""

import pytest

# Before they are imported: a failed assertion shows its values.
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("objects", "writers", "stores", "breakage")))

from contract.breakage import BreakageContract  # noqa: E402
from contract.objects import ObjectContract  # noqa: E402
from contract.stores import StoreContract  # noqa: E402
from contract.writers import WriterContract  # noqa: E402

__all__ = ["BreakageContract", "StorageContract", "StoreContract"]


class StorageContract(ObjectContract, WriterContract):
    """What ``levels.storage.Storage`` promises."""
