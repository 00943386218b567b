"""Messages between trainer and keeper: JSON behind a length, descriptors beside it, on a Unix socket.

Both ends check that the other runs under the same user before anything is read (``SO_PEERCRED``).
"""

import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from lazysnap.errors import KeeperUnavailable

MAX_MESSAGE_BYTES = 64 << 20
_MAX_FDS = 16
_READ_BYTES = 1 << 16

Message = dict[str, Any]
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


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))


class Connection:
    """One end of a socket. ``send`` may be called from several threads, ``receive`` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer_pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            sock.close()
            raise KeeperUnavailable(
                f"the socket's other end belongs to user {uid}, expected {os.getuid()}: refused; if another user "
                "squats on this name, set LAZYSNAP_JOB_ID to a name of your own"
            )
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._lock = threading.Lock()

    def send(self, message: Message, fds: tuple[int, ...] = (), timeout_s: float = 5.0) -> None:
        """Send one message. Blocks: at most ``timeout_s``. Raises: OSError, if the other end is gone or hangs."""
        body = json.dumps({**message, "fds": len(fds)}, separators=(",", ":")).encode()
        data = memoryview(struct.pack("<I", len(body)) + body)
        with self._lock:
            # Not settimeout(): it would also end a receive that another thread waits in.
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
            sent = socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
            try:
                while sent < len(data):
                    sent += self.sock.send(data[sent:])
            except OSError:
                # Half a message stands in the way of all later ones: the connection is over.
                self.sock.shutdown(socket.SHUT_RDWR)
                raise

    def set_receive_timeout(self, timeout_s: float | None) -> None:
        """Let ``receive`` give up after ``timeout_s``; ``None``: never."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s or 0.0))

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed."""
        return self.sock.fileno() < 0

    def receive(self, *, wait: bool = True) -> Received | None:
        """Read what is there: whole messages with their descriptors; ``None`` at the end. Blocks until readable.

        With ``wait=False`` it does not block; ``None`` if nothing is there.

        Raises: KeeperUnavailable, if the bytes are no messages.
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
            while len(self._buffer) >= 4:
                length = int.from_bytes(self._buffer[:4], "little")
                if length > MAX_MESSAGE_BYTES:
                    raise KeeperUnavailable(
                        f"a message of {length} bytes was announced; the limit is {MAX_MESSAGE_BYTES}"
                    )
                if len(self._buffer) < 4 + length:
                    break
                messages.append(self._parse(bytes(self._buffer[4 : 4 + length])))
                del self._buffer[: 4 + length]
        except KeeperUnavailable:
            with Unclaimed(messages):  # nobody gets to know of these
                raise
        return messages

    def _parse(self, body: bytes) -> tuple[Message, tuple[int, ...]]:
        try:
            message = json.loads(body)
            count = message["fds"]
            if type(message["type"]) is not str or type(count) is not int or not 0 <= count <= len(self._fds):
                raise ValueError("bad type or number of descriptors")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise KeeperUnavailable(f"the other end sent no message of this protocol: {error}") from error
        return message, tuple(self._fds.popleft() for _ in range(count))

    def close(self) -> None:
        """Close the socket and descriptors that nobody took."""
        while self._fds:
            os.close(self._fds.popleft())
        self.sock.close()
