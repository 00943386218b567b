"""Ports of keepers, and limits for connections that have not proven the secret: one interface, few at once, one log
line per host.
"""

import ipaddress
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lazysnap.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_UNKNOWN = 64
"""Connections that have not shown who they are yet; more are closed at once."""
_MAX_NAMED = 256
"""Addresses whose refusal is logged as a warning; a scanner must not fill the log."""
_PORT_S, _AGAIN_S = 30.0, 0.1
"""Seconds for which a replacement keeper waits silently for the dead one's port, and between two tries."""


class Violation(Exception):
    """The other end is no process of the job, or does not keep to the protocol."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds."""

    connect_s: float = 10.0
    """Seconds for connecting, for the handshake and for the first message, each."""
    send_s: float = 10.0
    """A peer that takes nothing for so long is dropped."""
    alive_s: float = 5.0
    """After so long without a message one is sent."""
    silence_s: float = 20.0
    """A peer that says nothing for so long is dropped."""


class Refusals:
    """The refused connections of one listener. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: set[str] = set()

    def warn(self, address: tuple[str, int], error: BaseException) -> None:
        """Warn once per host."""
        host, port = address[:2]
        with self._lock:
            is_news = host not in self._named and len(self._named) < _MAX_NAMED
            if is_news:
                self._named.add(host)
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "peers: refused %s:%d: %s", host, port, reason(error))


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address of this machine.

    Raises: ConfigError, if ``host`` means every interface; OSError, if the address is taken.
    """
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        raise ConfigError(f"keepers listen on one interface, got {host}: name the address of one")
    return socket.create_server((host, port), family=socket.AF_INET6 if address.version == 6 else socket.AF_INET)


class ReservedPort:
    """A port of one address of this machine, bound and not listened at: one keeper after the other may listen there."""

    def __init__(self, host: str) -> None:
        """Raises: OSError, if there is none."""
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
        """Let go of it. May be called again."""
        self._socket.close()


def listen_when_free(
    listen: Callable[[str, int], object], address: tuple[str, int], is_wanted: Callable[[], bool]
) -> None:
    """Listen on the address that all nodes know, now, or on a thread as soon as it is free.

    The keeper before this one may just be leaving it. A failure that lasts is logged once.
    Raises: ConfigError, if it is no address of one interface.
    """

    def keep_trying() -> None:
        warns_at = time.monotonic() + _PORT_S
        while is_wanted():
            time.sleep(_AGAIN_S)
            try:
                listen(*address)
                return
            except OSError as error:
                if time.monotonic() > warns_at:
                    warns_at = math.inf
                    logger.warning("other nodes cannot reach this keeper: %s:%d: %s; trying again", *address, error)

    try:
        listen(*address)
    except OSError:
        threading.Thread(target=keep_trying, name="lazysnap-listen", daemon=True).start()


def reason(error: BaseException) -> str:
    """Why a connection failed, for a message."""
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, EOFError):
        return "it closed the connection"
    return f"{type(error).__name__}: {error}"
