"""To test a place for snapshots: suites that say what it must do, and one that breaks on purpose.

Needs pytest, which lazysnap itself does not (docs/testing-backends.md).
"""

try:
    import pytest
except ImportError as error:
    raise ImportError("lazysnap.testing needs pytest: pip install pytest") from error

# Before they are imported: a failed assertion shows its values.
pytest.register_assert_rewrite(f"{__name__}.objects", f"{__name__}.writers", f"{__name__}.snapshots")
pytest.register_assert_rewrite(f"{__name__}.place")

from lazysnap.testing.contract import StorageContract  # noqa: E402
from lazysnap.testing.faulty import Act, Delay, Fail, Fault, FaultPlan, FaultyStorage, Flip, Hang, Truncate  # noqa: E402
from lazysnap.testing.place import MakeStorage  # noqa: E402

__all__ = [
    "Act",
    "Delay",
    "Fail",
    "Fault",
    "FaultPlan",
    "FaultyStorage",
    "Flip",
    "Hang",
    "MakeStorage",
    "StorageContract",
    "Truncate",
]
