"""Messages between trainer and keeper: JSON behind a short header, with descriptors, on a Unix socket.

The socket is a file that only its user can open (``keeper.runtime``). Both ends check that the other one runs under the
same user before anything is read (``SO_PEERCRED``).
"""

import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator

from lazysnap.errors import KeeperError
from lazysnap.keeper.protocol import PROTOCOL, Message, decode, encode

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
_MAX_FDS = 16
_READ_BYTES = 1 << 16
_POST_S = 0.05

_HEADER = struct.Struct("<IHH")
"""Bytes of the JSON that follows, version of the messages, number of descriptors."""

Received = list[tuple[Message, tuple[int, ...]]]


class Unclaimed:
    """Messages to be taken one by one; what is left of them at the end, because one cannot be used, is closed."""

    def __init__(self, received: Received) -> None:
        self._left = deque(received)

    def __iter__(self) -> Iterator[tuple[Message, tuple[int, ...]]]:
        while self._left:
            yield self._left.popleft()

    def __enter__(self) -> "Unclaimed":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (fd for _, fds in self._left for fd in fds):
            os.close(fd)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class OtherVersion(KeeperError):
    """The other end is of another version of lazysnap."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"it speaks protocol {protocol}, expected {PROTOCOL}")


def _packed(message: Message, count: int) -> memoryview:
    body = encode(message)
    return memoryview(_HEADER.pack(len(body), PROTOCOL, count) + body)


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))


class Connection:
    """One end of a socket. ``send`` may be called from several threads, ``receive`` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer_pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            sock.close()
            raise KeeperError(
                f"process {self.peer_pid} at the socket of this job's keeper is of user {uid}, expected user "
                f"{os.getuid()}: refused; set LAZYSNAP_RUNTIME_DIR to a directory that only this user can enter"
            )
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._lock = threading.Lock()
        self.waiting: deque[Message] = deque()
        """Messages for ``send_waiting``: the other end may be stopped for a moment."""
        self._emptying = threading.Lock()

    def send(self, message: Message, fds: tuple[int, ...] = (), timeout_s: float = 5.0) -> None:
        """Send one message. Blocks: at most ``timeout_s``. Raises: OSError, if the other end is gone or hangs."""
        data = _packed(message, len(fds))
        with self._lock:
            self._set_send_timeout(timeout_s)
            sent = socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
            self._send_rest(data[sent:])

    def post(self, message: Message) -> bool:
        """Send one message; ``False`` if the other end does not take it now. Blocks: not on the other end.

        Raises: OSError, if the other end is gone.
        """
        data = _packed(message, 0)
        if not self._lock.acquire(timeout=_POST_S):
            return False
        try:
            try:
                sent = self.sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._set_send_timeout(_POST_S)
            self._send_rest(data[sent:])
            return True
        finally:
            self._lock.release()

    def send_waiting(self) -> None:
        """Send as many of those that wait as the other end takes now, in order. Blocks: not on the other end."""
        with self._emptying:
            try:
                while self.waiting and self.post(self.waiting[0]):
                    self.waiting.popleft()
            except OSError as error:  # the thread that reads notices that the other end is gone
                logger.debug("no messages are taken: %s", error)

    def _set_send_timeout(self, timeout_s: float) -> None:
        # Not settimeout(): it would also end a receive that another thread waits in.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))

    def _send_rest(self, data: memoryview) -> None:
        try:
            while data:
                data = data[self.sock.send(data) :]
        except OSError:
            # Half a message stands in the way of all later ones: the connection is over.
            self.sock.shutdown(socket.SHUT_RDWR)
            raise

    @property
    def is_closed(self) -> bool:
        """True if this end was closed."""
        return self.sock.fileno() < 0

    def receive(self, *, wait: bool = True) -> Received | None:
        """Read what is there: whole messages with their descriptors; ``None`` at the end. Blocks until readable.

        With ``wait=False`` it does not block; ``None`` if nothing is there.

        Raises: KeeperError, if the bytes are no messages; OtherVersion.
        """
        try:
            # Not recv_fds(): it drops the flags (Python 3.11), and descriptors would leak into programs started later.
            flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
            data, ancillary, _, _ = self.sock.recvmsg(_READ_BYTES, socket.CMSG_LEN(_MAX_FDS * 4), flags)
        except (ConnectionError, BlockingIOError):
            return None
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(struct.unpack(f"{len(rights) // 4}i", rights[: len(rights) // 4 * 4]))
        if not data:
            return None
        self._buffer += data
        messages: Received = []
        try:
            while len(self._buffer) >= _HEADER.size:
                length, protocol, count = _HEADER.unpack_from(self._buffer)
                if protocol != PROTOCOL:
                    raise OtherVersion(protocol)
                if length > MAX_MESSAGE_BYTES:
                    raise KeeperError(f"a message of {length} bytes was announced; the limit is {MAX_MESSAGE_BYTES}")
                end = _HEADER.size + length
                if len(self._buffer) < end:
                    break
                if count > len(self._fds):
                    raise KeeperError(f"{count} descriptors were announced, {len(self._fds)} came")
                message = decode(bytes(self._buffer[_HEADER.size : end]))
                messages.append((message, tuple(self._fds.popleft() for _ in range(count))))
                del self._buffer[:end]
        except KeeperError:
            with Unclaimed(messages):  # nobody gets to know of these
                raise
        return messages

    def close(self) -> None:
        """Close the socket and descriptors that nobody took."""
        while self._fds:
            os.close(self._fds.popleft())
        self.sock.close()
