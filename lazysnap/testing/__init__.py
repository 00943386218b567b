"""To test a place for snapshots: suites that say what it must do, and one that breaks on purpose.

Needs pytest, which lazysnap itself does not (docs/testing-backends.md).
"""

try:
    import pytest
except ImportError as error:
    raise ImportError("lazysnap.testing needs pytest: pip install pytest") from error

# Before they are imported: a failed assertion shows its values.
pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in ("place", "objects", "writers", "snapshots", "immutable", "stores", "breakage"))
)

from lazysnap.testing.breakage import BreakageContract  # noqa: E402
from lazysnap.testing.contract import StorageContract  # noqa: E402
from lazysnap.testing.faulty import FaultyStorage  # noqa: E402
from lazysnap.testing.place import MakeStorage, Place  # noqa: E402
from lazysnap.testing.plan import Act, Delay, Fail, Fault, FaultPlan, Flip, Hang, Truncate  # noqa: E402
from lazysnap.testing.stores import StoreContract  # noqa: E402

__all__ = [
    "Act",
    "BreakageContract",
    "Delay",
    "Fail",
    "Fault",
    "FaultPlan",
    "FaultyStorage",
    "Flip",
    "Hang",
    "MakeStorage",
    "Place",
    "StorageContract",
    "StoreContract",
    "Truncate",
]
