"""A disk that is full, slow or hangs for the programs of ``lazysnap chaos``, without the rights of root.

``chaos_disk.c``, compiled here, is preloaded into these programs and stands before the calls that write to files.
"""

import mmap
import os
import pathlib
import shutil
import subprocess
import sys
from enum import IntEnum

SOURCE = pathlib.Path(__file__).with_suffix(".c")
_PROBE = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x')"


class DiskFault(IntEnum):
    """The trouble of the disk, as ``chaos_disk.c`` numbers it."""

    NONE = 0
    FULL = 1
    SLOW = 2
    HANG = 3


class Disk:
    """The switch of these faults, for all processes that are started with ``environment``."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Compile the library into ``directory``. Raises: OSError, with the reason why this machine cannot do it."""
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
        if compiler is None:
            raise OSError("no C compiler (cc, gcc or clang) is installed")
        library, control = directory / "chaos_disk.so", directory / "chaos_disk"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        preload = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
        self.environment = {"LD_PRELOAD": preload, "LAZYSNAP_CHAOS_DISK": str(control)}
        control.write_bytes(bytes(8))
        with control.open("r+b") as file:
            self._control = memoryview(mmap.mmap(file.fileno(), 8)).cast("i")
        self.set(DiskFault.FULL)
        probe = [sys.executable, "-I", "-c", _PROBE, str(directory / "probe")]
        environment = {**os.environ, **self.environment, "LAZYSNAP_CHAOS_DIR": str(directory)}
        if not subprocess.run(probe, env=environment, stderr=subprocess.DEVNULL, check=False).returncode:
            raise OSError("a preloaded library does not meet the writes of programs here")
        self.set(DiskFault.NONE)

    def set(self, fault: DiskFault) -> None:
        """Make the disk like that from now on."""
        self._control[1] = 0
        self._control[0] = fault

    @property
    def calls(self) -> int:
        """Number of calls that met the fault since it was set."""
        return self._control[1]
