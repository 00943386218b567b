"""The newest step of a program that ``lazysnap run`` started, for its supervisor."""

import contextlib
import os
import struct
import sys
from types import ModuleType

DIRECTORY = "LAZYSNAP_WARM"
"""Environment variable: the directory of the supervisor. It holds the file ``steps``."""
PARENT_MODULE = "_lazysnap_warm"
"""The name under which the module of the warm parent is found in its children."""
_FORM = struct.Struct("q")


def read(directory: str) -> int:
    """Return the newest step that any process of this supervisor reached; -1 before the first."""
    with contextlib.suppress(OSError, struct.error), open(os.path.join(directory, "steps"), "rb") as file:
        step: int = _FORM.unpack(file.read())[0]
        return step
    return -1


class Steps:
    """Reports the newest step to the supervisor, if there is one."""

    def __init__(self) -> None:
        self._directory = os.environ.get(DIRECTORY)
        self._newest = -1
        if self._directory:
            self._newest = read(self._directory)
        self._is_first = True

    def reached(self, step: int) -> None:
        """Record that ``step`` is over. The first call also records the imported modules, for the next start.

        Never raises: a training continues without its supervisor.
        """
        if self._is_first:
            self._is_first = False
            parent: ModuleType | None = sys.modules.get(PARENT_MODULE)
            if parent is not None:
                parent.record()
        if self._directory and step > self._newest:
            self._newest = step
            with contextlib.suppress(OSError):
                file = os.open(os.path.join(self._directory, "steps"), os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    os.pwrite(file, _FORM.pack(step), 0)
                finally:
                    os.close(file)
