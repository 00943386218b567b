"""Names of objects by which a place is tried out."""

import os
import re

_PROBE = re.compile(r"\.lazysnap-probe-[0-9a-f]{16}")


def probe_name() -> str:
    """A new name."""
    return f".lazysnap-probe-{os.urandom(8).hex()}"


def is_probe(name: str) -> bool:
    """Whether this is such a name."""
    return _PROBE.fullmatch(name) is not None
