"""What every listener of a keeper does with connections of strangers: one interface, few of them, one line per host."""

import asyncio
import ipaddress
import logging
import socket
import threading
from dataclasses import dataclass

from lazysnap.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_UNKNOWN = 64
"""Connections that have not shown who they are yet; more are closed at once."""
_MAX_NAMED = 256
"""Addresses whose refusal is logged as a warning; a scanner must not fill the log."""


class Violation(Exception):
    """The other end is no process of the job, or does not keep to the protocol."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds."""

    connect_s: float = 10.0
    """For a connection, the TLS handshake and what follows it, each."""
    send_s: float = 10.0
    """A peer that takes nothing for so long is dropped."""
    alive_s: float = 5.0
    """After so long without a message one is sent."""
    silence_s: float = 20.0
    """A peer that says nothing for so long is dropped."""


class Refusals:
    """The refused connections of one listener. Any thread."""

    def __init__(self, what: str) -> None:
        """``what``: the listener's, for the log."""
        self._what = what
        self._lock = threading.Lock()
        self._named: set[str] = set()

    def say(self, address: tuple[str, int], error: BaseException) -> None:
        """Warn once per host."""
        host, port = address[:2]
        with self._lock:
            is_news = host not in self._named and len(self._named) < _MAX_NAMED
            if is_news:
                self._named.add(host)
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "%s: refused %s:%d: %s", self._what, host, port, reason(error))


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine.

    Raises: ConfigError, if ``host`` means every interface; OSError, if the address cannot be had.
    """
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        raise ConfigError(f"keepers listen on one interface, got {host}: name the address of one")
    return socket.create_server((host, port), family=socket.AF_INET6 if address.version == 6 else socket.AF_INET)


def reason(error: BaseException) -> str:
    """Why a connection failed, for a message."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):  # two classes before Python 3.11
        return "it does not answer in time"
    if isinstance(error, EOFError):
        return "it closed the connection"
    return f"{type(error).__name__}: {error}"
