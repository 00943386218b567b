"""Ports of keepers, and limits for unauthenticated connections: one interface, few connections, one log line per
host.
"""

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from lazysnap.errors import ConfigError
from lazysnap.peers.wire import Violation, reason

logger = logging.getLogger(__name__)

MAX_UNKNOWN = 64
"""Maximum unauthenticated connections; more are closed at once."""
MAX_READERS = 1024
"""Maximum readers at a time; more are closed at once. A reader with a hanging source counts until that returns."""
_MAX_NAMED = 256
"""Maximum hosts whose refusal is logged as a warning: a scanner must not fill the log."""
_BACKLOG = 128


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds."""

    connect_s: float = 10.0
    """Seconds for connecting, for the handshake, and, at the connecting side, for the first message of a link."""
    send_s: float = 10.0
    """Seconds after which a peer that receives nothing is dropped."""
    alive_s: float = 5.0
    """Seconds without a message on a link after which a heartbeat is sent."""
    silence_s: float = 20.0
    """Seconds after which a silent link is dropped."""
    idle_s: float = 300.0
    """Seconds after which an idle reader is dropped."""
    port_warning_s: float = 30.0
    """Seconds that a new keeper waits for the port of the dead one without a message."""


class ConnectionLimit:
    """Counts the connections of one port. On the loop's thread.

    Invariant: at most ``MAX_UNKNOWN`` open connections are unauthenticated, and at most ``MAX_READERS`` read. Readers
    cannot block the one link of each other node.
    """

    def __init__(self) -> None:
        self._num_unknown = 0
        self._num_readers = 0
        self._named_hosts: set[str] = set()

    def enter(self) -> bool:
        """Count a new unauthenticated connection. Returns: False if it must be closed because there are too many."""
        if self._num_unknown >= MAX_UNKNOWN:
            return False
        self._num_unknown += 1
        return True

    def leave(self) -> None:
        """Stop counting a connection as unauthenticated: it is authenticated, or ended."""
        self._num_unknown -= 1

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader within the context. Raises: Violation, if there are too many."""
        if self._num_readers >= MAX_READERS:
            raise Violation("there are too many readers")
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1

    def refuse(self, address: str, host: str, error: BaseException) -> None:
        """Log that a connection was refused: once per host as a warning."""
        level = logging.DEBUG
        if host not in self._named_hosts and len(self._named_hosts) < _MAX_NAMED:
            self._named_hosts.add(host)
            level = logging.WARNING
        logger.log(level, "peers: refused %s: %s", address, reason(error))


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address of this machine and does not block.

    Raises: ConfigError, if ``host`` means every interface, or is no address; OSError, if the address is taken.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(f"keepers listen on one interface, got {host}: give its address") from error
    if address.is_unspecified:
        raise ConfigError(f"keepers listen on one interface, got {host}: name the address of one")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


class ReservedPort:
    """A reserved port of one address of this machine, at which one keeper after the other may listen."""

    def __init__(self, host: str) -> None:
        """Raises: OSError, if no port is free."""
        if host in ("0.0.0.0", "::"):
            raise OSError("it means every interface, name the address of one")
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise

    @property
    def number(self) -> int:
        """The port."""
        return int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()
