"""To test a place for snapshots: suites that say what it must do, and one that breaks on purpose.

Needs pytest, which lazysnap itself does not (docs/testing-backends.md).
"""

try:
    import pytest
except ImportError as error:
    raise ImportError("lazysnap.testing needs pytest: pip install pytest") from error

# Before they are imported: a failed assertion shows its values.
pytest.register_assert_rewrite(f"{__name__}.objects", f"{__name__}.writers", f"{__name__}.snapshots")
