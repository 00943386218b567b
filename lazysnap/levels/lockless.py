"""Claims and leases where nothing can be locked: small objects beside those that they are about.

A writer holds the object ``.<name>.tmp-claim`` from before its first byte until its snapshot is committed. It is made
by a put that fails if there is one already, so of any number of writers one wins; whoever wants to remove what a dead
writer left takes the claim first. A reader holds ``reading-<token>.lease`` in the snapshot's directory.

Both say which process made them. One that is known to have died is believed dead at once; of processes elsewhere only
the age of the object tells, which the living renew.
"""

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from lazysnap.errors import LevelError, NameTaken
from lazysnap.levels.files import TEMP_MARK
from lazysnap.levels.owner import OwnerState, sign, state_of

logger = logging.getLogger(__name__)

LEASE_S = 600.0
"""A reader whose lease was not renewed for so long has died."""
_CLAIM_END = f"{TEMP_MARK}claim"
_LEASE_HEAD, _LEASE_END = "reading-", ".lease"
_PROBE_HEAD = ".lazysnap-probe-"
_ATTEMPTS = 4
_RENEWALS = 4
_MIN_RENEWAL_S = 60.0
_JOIN_S = 5.0

_held: set[bytes] = set()
"""What this process holds: one of its own that is not here was given up, even if it could not be removed."""


def claim_path(path: str) -> str:
    """Where the claim on ``path`` is."""
    directory, _, name = path.rpartition("/")
    return f"{directory}/.{name}{_CLAIM_END}"


def probe_name() -> str:
    """For an object by which a place is tried out."""
    return f"{_PROBE_HEAD}{os.urandom(8).hex()}"


def _is_lease(name: str) -> bool:
    return name.startswith(_LEASE_HEAD) and name.endswith(_LEASE_END)


class LocklessStorage(ABC):
    """What storages share whose only means are objects with a time."""

    url: str
    abandoned_after_s: float

    @abstractmethod
    def get(self, path: str) -> bytes:
        """See ``Storage.get``."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """See ``Storage.delete``."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is such an object, asked anew."""

    @abstractmethod
    def age_s(self, path: str) -> float | None:
        """Seconds since it was written; ``None`` if the place does not say. Raises: FileNotFoundError."""

    @abstractmethod
    def overwrite(self, path: str, data: bytes) -> None:
        """Put a small object, whatever is there."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Put a small object by a request that the place refuses if there is one. Raises: NameTaken."""

    @abstractmethod
    def can_create(self) -> bool:
        """Whether ``create`` was seen to be refused; asks the place once."""

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """See ``Storage.put``. Where the place cannot refuse, looking before and after is all that can be done."""
        if not exclusive:
            self.overwrite(path, data)
        elif self.can_create():
            try:
                self.create(path, data)
            except NameTaken:
                # It may be our own that is in the way: a driver repeats what was answered into the void.
                if not self._holds(path, data):
                    raise
        else:
            if self.exists(path):
                raise NameTaken(f"{self.url}/{path}: there is one already")
            self.overwrite(path, data)
            if self.get(path) != data:
                raise NameTaken(f"{self.url}/{path}: another one came at the same moment")

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return self.get(path) == data
        except FileNotFoundError:
            return False

    def is_given_up(self, path: str, after_s: float) -> bool:
        """Whether the one who made the claim or lease at ``path`` holds it no more; also if it is gone."""
        try:
            signed, age = self.get(path), self.age_s(path)
        except FileNotFoundError:
            return True
        state = state_of(signed)
        if state is OwnerState.SELF:
            return signed not in _held
        return state is OwnerState.DEAD or (age is not None and age >= after_s)

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """See ``Storage.delete_abandoned``: whoever gets the claim knows that no writer is there."""
        directory, _, name = path.rpartition("/")
        if not self.exists(path):
            return False
        if name.endswith(_CLAIM_END):
            if not self.is_given_up(path, self.abandoned_after_s):
                return False
            self.delete(path)
            return True
        if name.startswith(".") and TEMP_MARK in name:
            name = name[1:].split(TEMP_MARK)[0]
        try:
            claim = Claim(self, f"{directory}/{name}")
        except NameTaken:
            return False
        with contextlib.closing(claim):
            if (unless is not None and self.exists(unless)) or not self.exists(path):
                return False
            self.delete(path)
            return True

    @contextlib.contextmanager
    def lease(self, path: str) -> Iterator[None]:
        """See ``Storage.lease``."""
        lease = _Lease(self, path.rpartition("/")[0])
        try:
            yield
        finally:
            lease.close()

    def is_leased(self, path: str) -> bool:
        """See ``Storage.is_leased``; removes leases of the dead."""
        directory = path.rpartition("/")[0]
        for name in filter(_is_lease, self.list(directory, _LEASE_HEAD)):
            if not self.is_given_up(f"{directory}/{name}", LEASE_S):
                return True
            with contextlib.suppress(LevelError):  # not ours to delete: it counts for nothing all the same
                self.delete(f"{directory}/{name}")
        return False

    def delete_old_probes(self) -> list[str]:
        """Remove what processes left that died while they tried the place out; the names that went."""
        gone = []
        for name in self.list():
            if name.startswith(_PROBE_HEAD):
                with contextlib.suppress(FileNotFoundError):
                    age = self.age_s(name)
                    if age is not None and age >= self.abandoned_after_s:
                        self.delete(name)
                        gone.append(name)
        return gone

    # The last one: it hides the type from the annotations behind it.
    @abstractmethod
    def list(self, path: str = "", prefix: str = "") -> list[str]:
        """See ``Storage.list``."""


class Claim:
    """The right to write, or remove, one object; see the module. Of the dead, their claims are taken over."""

    def __init__(self, storage: LocklessStorage, path: str) -> None:
        """Raises: NameTaken, LevelError."""
        self._storage = storage
        self._path = path
        self._object = claim_path(path)
        self._signed = sign("claim")
        self._renewed = time.monotonic()
        _held.add(self._signed)
        try:
            self._take()
        except NameTaken:
            _held.discard(self._signed)
            raise
        except BaseException:
            self.close()  # it may be there: the answer was lost
            raise

    def _take(self) -> None:
        for _ in range(_ATTEMPTS):
            try:
                self._storage.put(self._object, self._signed, exclusive=True)
                return
            except NameTaken:
                if not self._storage.is_given_up(self._object, self._storage.abandoned_after_s):
                    break
                self._storage.delete(self._object)
        raise NameTaken(f"{self._storage.url}/{self._path}: another writer is at it")

    def is_held(self) -> bool:
        """Whether nobody took it over, because this process looked dead from elsewhere. Asks the place."""
        try:
            return self._storage.get(self._object) == self._signed
        except FileNotFoundError:
            return False

    def check_free(self) -> None:
        """Raises: NameTaken, if the claim is lost or there is an object of the name."""
        if not self.is_held():
            raise NameTaken(f"{self._storage.url}/{self._path}: its claim is gone, another writer may have it")
        if self._storage.exists(self._path):
            raise NameTaken(f"{self._storage.url}/{self._path}: there is one already")

    def renew(self) -> None:
        """Called now and then while the object is written: makes the claim young, if it is not."""
        now = time.monotonic()
        if now - self._renewed < max(_MIN_RENEWAL_S, self._storage.abandoned_after_s / _RENEWALS):
            return
        self._renewed = now
        if not self.is_held():
            raise NameTaken(f"{self._storage.url}/{self._path}: its claim is gone, another writer may have it")
        self._storage.overwrite(self._object, self._signed)

    def abandon(self) -> None:
        """Give it up where the place does not answer: it goes with the next sweep."""
        _held.discard(self._signed)

    def close(self) -> None:
        """Give it up; harmless twice. What cannot be removed now counts as given up, and goes with the next sweep."""
        if self._signed not in _held:
            return
        try:
            if self.is_held():
                self._storage.delete(self._object)
        except LevelError as error:
            logger.debug("a claim stays for the next sweep: %s", error)
        finally:
            _held.discard(self._signed)


class _Lease:
    """Renewed from a thread while it is held; one that cannot be written protects nothing, and says nothing."""

    def __init__(self, storage: LocklessStorage, directory: str) -> None:
        self._storage = storage
        self._path = f"{directory}/{_LEASE_HEAD}{os.urandom(8).hex()}{_LEASE_END}"
        self._signed = sign("lease")
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        _held.add(self._signed)
        try:
            storage.overwrite(self._path, self._signed)
        except LevelError as error:
            logger.debug("read without a lease: %s", error)
            return
        self._thread = threading.Thread(target=self._renew, name="lazysnap-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_S / _RENEWALS):
            with contextlib.suppress(LevelError):
                self._storage.overwrite(self._path, self._signed)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            with contextlib.suppress(LevelError):
                self._storage.delete(self._path)
        _held.discard(self._signed)
