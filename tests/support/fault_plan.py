"""What goes wrong at which operation of a ``FaultyStorage``."""

import errno
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

WRITES = frozenset({"write", "put"})
READS = frozenset({"get", "read_into"})
DATA_OPERATIONS = WRITES | READS
"""Those that move the bytes of objects: what ``Flip`` and ``Truncate`` act on (``Truncate`` also on ``list``)."""
CHANGES = frozenset(
    {"create", "write", "publish", "put", "delete", "delete_abandoned", "delete_directory", "abort_stale"}
)
"""Those that change what is at the place."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when. One of the classes below."""

    at: int
    """The n-th operation, counted from 1."""
    operation: str | None = field(default=None, kw_only=True)
    """Count the operations of this name only."""
    lasting: bool = field(default=False, kw_only=True)
    """Also at every operation that follows (of that name)."""


@dataclass(frozen=True)
class Fail(Fault):
    """Raises what a real place would: LevelError or LevelError; FileNotFoundError for ``ENOENT``.

    ``delete_directory`` never raises: there it does nothing.
    """

    error: int = field(default=errno.EIO, kw_only=True)
    """Number of the OSError."""
    after: bool = field(default=False, kw_only=True)
    """After the operation took effect, as when the answer is lost. (A ``create`` that raises is undone.)"""


@dataclass(frozen=True)
class Truncate(Fault):
    """The second half of what is written or read is lost (zeros, where more of the object follows); of a listing, the
    last name.
    """

    claims_success: bool = field(default=False, kw_only=True)
    """Say nothing of it. Else a write raises LevelError, a read FormatError. (A listing says nothing ever.)"""


@dataclass(frozen=True)
class Flip(Fault):
    """One bit of what is written or read is another one; nothing is raised."""


@dataclass(frozen=True)
class Hang(Fault):
    """Blocks until ``FaultPlan.release``, then goes on as if nothing had been."""


@dataclass(frozen=True)
class Act(Fault):
    """Calls ``action`` just before the operation: fills a real disk, kills a real server."""

    action: Callable[[], object] = field(kw_only=True)


class FaultPlan:
    """The faults to come, and the operations that were. Thread-safe; may be shared by several storages."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._counts: Counter[str | None] = Counter()
        self.operations: list[str] = []
        """Names of the operations so far, in order."""
        self.happened: list[Fault] = []
        """The faults that were reached, in order."""
        self.hanging = threading.Event()
        """Set as soon as an operation hangs."""

    def release(self) -> None:
        """Let go of what hangs, now and later. A test calls this in any case, or its threads stay behind."""
        self._released.set()

    @property
    def is_silent(self) -> bool:
        """Whether bytes are to be lost and nothing said."""
        return any(isinstance(fault, Flip) or getattr(fault, "claims_success", False) for fault in self._faults)

    def next(self, operation: str) -> list[Fault]:
        """Count one operation; what is to go wrong with it."""
        with self._lock:
            self.operations.append(operation)
            self._counts[operation] += 1
            self._counts[None] += 1
            due = [fault for fault in self._faults if self._is_due(fault, operation)]
            self.happened += due
            return due

    def _is_due(self, fault: Fault, operation: str) -> bool:
        if fault.operation not in (None, operation):
            return False
        count = self._counts[fault.operation]
        return count >= fault.at if fault.lasting else count == fault.at

    def wait_released(self) -> None:
        """Hang."""
        self.hanging.set()
        self._released.wait()
