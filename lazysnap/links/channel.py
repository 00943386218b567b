"""A channel between two processes of a job: frames and raw bytes over one TLS 1.3 connection, by blocking calls.

Both sides present the job's certificate and accept no other one. On the wire: ``links.framing`` with the letters
``lazyread``. The raw bytes of a payload go from and to the caller's memory.
"""

import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any, Generic

from msgspec import Struct, msgpack

from lazysnap.links.certificate import Certificate
from lazysnap.links.framing import LENGTH_BYTES, PREAMBLE_BYTES, Framing, M
from lazysnap.links.strangers import Violation

PROTOCOL = 1
"""Version of the messages. Raised with every change that the other end sees."""
MAX_FRAME_BYTES = 1 << 16
_PROGRESS_BYTES = 1 << 18
_LETTERS = b"lazyread"


class _Secure(ssl.SSLSocket):
    """Connected, or closed: ``ssl`` leaves a socket open whose other end is gone before it is wrapped."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error


class Identity:
    """The job's certificate, ready for connections of one side (``ssl.PROTOCOL_TLS_SERVER`` or ``…_CLIENT``)."""

    def __init__(self, certificate: Certificate, purpose: int) -> None:
        self._context = certificate.context(purpose)
        self._context.sslsocket_class = _Secure
        self._is_server = purpose == ssl.PROTOCOL_TLS_SERVER
        if self._is_server:
            self._context.num_tickets = 0  # sessions are not resumed
        self._der = ssl.PEM_cert_to_DER_cert(certificate.cert_pem)

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Over this connection, before the handshake. It takes ``connection`` over. Raises: OSError."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A node that is gone without a word is noticed within a minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return self._context.wrap_socket(connection, server_side=self._is_server, do_handshake_on_connect=False)

    def handshake(self, secure: ssl.SSLSocket, timeout_s: float) -> None:
        """Blocks: at most ``timeout_s``. Raises: OSError; Violation, if the other end has another certificate."""
        secure.settimeout(timeout_s)
        secure.do_handshake()
        if secure.getpeercert(binary_form=True) != self._der:
            raise Violation("another certificate than this job's")


class Channel(Generic[M]):
    """One connection after its handshake. Its calls raise OSError, EOFError or Violation: it is of no use then.

    One thread uses it. Inside ``waiting`` another one may call ``send_beside``.
    """

    def __init__(self, secure: ssl.SSLSocket, decoder: "msgpack.Decoder[M]", send_s: float) -> None:
        """``send_s``: an other end that takes nothing for so long has failed."""
        self._secure, self._send_s = secure, send_s
        self._framing = Framing((_LETTERS, PROTOCOL), MAX_FRAME_BYTES, decoder)
        self._in_use = threading.Lock()
        self._in_use.acquire()  # by the one thread, except inside ``waiting``

    def greet(self, timeout_s: float) -> None:
        """Exchange protocol numbers. Blocks: at most ``timeout_s``."""
        self._secure.settimeout(timeout_s)
        self._secure.sendall(self._framing.preamble)
        self._framing.check_preamble(self._read(PREAMBLE_BYTES, time.monotonic() + timeout_s))

    def send(self, message: Struct, payload: memoryview | None = None) -> None:
        """Send a frame, and behind it the bytes of ``payload``. Blocks: while the other end takes some of them."""
        self._secure.settimeout(self._send_s)
        self._secure.sendall(self._framing.frame(message))
        if payload is not None:
            for start in range(0, len(payload), _PROGRESS_BYTES):  # a call fails after ``send_s``, even if bytes move
                self._secure.sendall(payload[start : start + _PROGRESS_BYTES])

    def receive(self, timeout_s: float) -> M:
        """The next message. Blocks: at most ``timeout_s`` until all of it is there."""
        deadline = time.monotonic() + timeout_s
        length = self._framing.length(self._read(LENGTH_BYTES, deadline))
        return self._framing.decode(self._read(length, deadline))

    def receive_into(self, out: memoryview, silence_s: float) -> None:
        """Fill ``out`` with raw bytes. Blocks: while they arrive, at most ``silence_s`` without any."""
        self._secure.settimeout(silence_s)
        got = 0
        while got < len(out):
            if not (received := self._secure.recv_into(out[got:])):
                raise EOFError
            got += received

    def _read(self, size_bytes: int, deadline: float) -> bytearray:
        data, got = bytearray(size_bytes), 0
        while got < size_bytes:
            self._secure.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (received := self._secure.recv_into(memoryview(data)[got:])):
                raise EOFError
            got += received
        return data

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The thread does something else for a while, and does not use the connection."""
        self._in_use.release()
        try:
            yield
        finally:
            self._in_use.acquire()

    def send_beside(self, message: Struct) -> None:
        """Send from another thread, only if the one thread is inside ``waiting``. Never blocks."""
        if not self._in_use.acquire(blocking=False):
            return
        try:
            self._secure.settimeout(0.0)
            self._secure.sendall(self._framing.frame(message))
        except OSError:  # the other end is gone, or takes nothing: half a frame may be sent
            shut(self._secure)
        finally:
            self._in_use.release()


def shut(secure: ssl.SSLSocket) -> None:
    """End a connection from any thread: whoever uses it gets an error at once."""
    # Not SSLSocket.shutdown, which takes the encryption off first: another thread could be sending.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(secure, socket.SHUT_RDWR)
