"""What places without locks have in common: only the age of an object tells whether its writer is dead."""

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator

from lazysnap.levels.storage import SETTLED

_PROBE = re.compile(r"\.lazysnap-probe-[0-9a-f]{16}")


def probe_name() -> str:
    """For an object by which a place is tried out."""
    return f".lazysnap-probe-{os.urandom(8).hex()}"


def is_probe(name: str) -> bool:
    """Whether this is such a name."""
    return _PROBE.fullmatch(name) is not None


class ObjectStorage(ABC):
    """See ``levels.storage.Storage``. There are no leases: a reader whose object vanished takes the next source."""

    abandoned_after_s: float

    @abstractmethod
    def delete(self, path: str) -> None:
        """See ``Storage.delete``."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is such an object, asked anew."""

    @abstractmethod
    def age_s(self, path: str) -> float | None:
        """Seconds since it was written; ``None`` if the place does not say. Raises: FileNotFoundError."""

    @contextlib.contextmanager
    def lease(self, path: str) -> Iterator[None]:
        """Nothing is held."""
        yield

    def is_leased(self, path: str) -> bool:
        """Nothing is."""
        return False

    def is_link(self, path: str) -> bool:
        """Most places have none."""
        return False

    def is_settled(self, path: str) -> bool:
        """See ``Storage.is_settled``."""
        return self._is_older(path, SETTLED * self.abandoned_after_s)

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """See ``Storage.delete_abandoned``."""
        try:
            if not self._is_older(path, self.abandoned_after_s):
                return False
        except FileNotFoundError:
            return False
        if unless is not None and self.exists(unless):
            return False
        self.delete(path)
        return True

    def _is_older(self, path: str, seconds: float) -> bool:
        age = self.age_s(path)
        return age is not None and age >= seconds
