"""What lies in a directory while keepers write and delete there."""

import os
import pathlib


def files_below(root: str | os.PathLike[str], pattern: str = "*") -> list[pathlib.Path]:
    """Files of a tree whose paths end as ``pattern`` says, sorted.

    ``pathlib`` fails at a directory that goes while it walks; for ``os.walk`` that one is empty.
    """
    paths = (pathlib.Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return sorted(path for path in paths if path.match(pattern))
