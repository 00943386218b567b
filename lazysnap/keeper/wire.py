"""Exchange of messages and descriptors between two processes of one node.

A frame on a Unix stream socket; descriptors are sent with its first byte (``SCM_RIGHTS``)::

    u32 length of the body | u16 protocol | u16 number of descriptors | body: one message as JSON

There is no handshake and no secret. The socket is a file that only its user can access (``keeper.runtime``), and the
kernel names the process and the user at the other end (``SO_PEERCRED``).
"""

import array
import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Sequence

import msgspec

from lazysnap.core.messages import PROTOCOL, KeeperState, TrainerState
from lazysnap.errors import KeeperError
from lazysnap.keeper.questions import Answer, Question

MAX_BODY_BYTES = 4 << 20
MAX_DESCRIPTORS = 64
_READ_BYTES = 1 << 16
_HEADER = struct.Struct("<IHH")
_CREDENTIALS = struct.Struct("3i")

LocalMessage = TrainerState | KeeperState | Question | Answer
# Built at import, on one thread: two threads that use a type first at the same time crash the process (msgspec 0.22).
msgspec.json.Decoder(LocalMessage)


class WireError(KeeperError):
    """The other process is of another user, or its bytes are no message."""


class OtherVersion(WireError):
    """The other process has another version of lazysnap."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"it speaks protocol {protocol}, expected {PROTOCOL}")


class Frame:
    """A received message with its descriptors. A caller that takes a descriptor removes it from the list."""

    def __init__(self, message: LocalMessage, descriptors: list[int]) -> None:
        self.message = message
        self.descriptors = descriptors

    def close(self) -> None:
        """Close the remaining descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class Channel:
    """One end of a connection. Nothing blocks, except ``wait``. Not thread-safe.

    At most one message waits to be sent. Most messages are the whole state, so the newest one replaces an unsent one.

    Example::

        channel = Channel(sock)
        channel.send(Question(about="status"))
        channel.wait(timeout_s=1.0)
        for frame in channel.receive() or []:
            print(frame.message)
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take a connected socket. Raises: WireError, if the other process is of another user."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        peer_pid, peer_uid, _ = _CREDENTIALS.unpack(credentials)
        if peer_uid != os.getuid():
            sock.close()
            raise WireError(
                f"process {peer_pid} at the socket of this job's keeper is of user {peer_uid}, expected user "
                f"{os.getuid()}: refused; set LAZYSNAP_RUNTIME_DIR to a directory that only this user can enter"
            )
        sock.setblocking(False)
        self.peer_pid = peer_pid
        """The process that connected, or that made the pair of sockets."""
        self._socket = sock
        self._received = bytearray()
        self._received_descriptors: list[int] = []
        self._unsent = memoryview(b"")
        self._unsent_descriptors: list[int] = []
        """Duplicates: their owner may close the originals before they are sent."""

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector; -1 once it is closed."""
        return self._socket.fileno()

    # Sending

    @property
    def is_sending(self) -> bool:
        """True if a message is not sent completely. Then call ``flush`` when the socket is writable."""
        return len(self._unsent) > 0

    def send(self, message: LocalMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message, or as much of it as the socket accepts.

        Only call this while ``is_sending`` is False. The caller may close the descriptors afterwards.
        Raises: WireError, if the message is too large; OSError, if the other end is gone.
        """
        assert not self.is_sending, "the message before is not sent yet"
        body = _encode(message)
        if len(body) > MAX_BODY_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            raise WireError(
                f"{type(message).__name__} has {len(body)} bytes and {len(descriptors)} descriptors; a message has at "
                f"most {MAX_BODY_BYTES} and {MAX_DESCRIPTORS}"
            )
        self._unsent_descriptors = _copies(descriptors)
        self._unsent = memoryview(_HEADER.pack(len(body), PROTOCOL, len(descriptors)) + body)
        self.flush()

    def flush(self) -> None:
        """Send the rest of the message. Raises: OSError, if the other end is gone."""
        while self.is_sending:
            try:
                sent_bytes = self._send_some()
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent_bytes:]
            self._close_unsent_descriptors()

    def _send_some(self) -> int:
        if not self._unsent_descriptors:
            return self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
        rights = array.array("i", self._unsent_descriptors).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        return self._socket.sendmsg([self._unsent], ancillary, socket.MSG_NOSIGNAL)

    def _close_unsent_descriptors(self) -> None:
        for descriptor in self._unsent_descriptors:
            os.close(descriptor)
        self._unsent_descriptors = []

    # Receiving

    def receive(self) -> list[Frame] | None:
        """Return the completely received messages; None once the other end has closed.

        Raises: OtherVersion; WireError, for anything else than messages.
        """
        is_open = self._read_all()
        frames = self._split_frames()
        if not frames and not is_open:
            return None
        return frames

    def _read_all(self) -> bool:
        """Read all received bytes. Returns: False if the other end has closed."""
        ancillary_bytes = socket.CMSG_LEN(MAX_DESCRIPTORS * array.array("i").itemsize)
        while True:
            try:
                # Not recv_fds(): it drops the flags (Python 3.11), and descriptors would leak into new programs.
                data, ancillary, flags, _ = self._socket.recvmsg(_READ_BYTES, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            for level, kind, rights in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._received_descriptors += _descriptors_in(rights)
            if flags & socket.MSG_CTRUNC:
                raise WireError("more descriptors came than one message may carry, or than this process may open")
            if not data:
                return False
            self._received += data

    def _split_frames(self) -> list[Frame]:
        frames: list[Frame] = []
        try:
            frame = self._next_frame()
            while frame is not None:
                frames.append(frame)
                frame = self._next_frame()
        except WireError:
            for frame in frames:  # these are never returned
                frame.close()
            raise
        return frames

    def _next_frame(self) -> Frame | None:
        """Return the next completely received message; None if there is none."""
        if len(self._received) < _HEADER.size:
            return None
        body_bytes, protocol, num_descriptors = _HEADER.unpack_from(self._received)
        if protocol != PROTOCOL:
            raise OtherVersion(protocol)
        if body_bytes > MAX_BODY_BYTES:
            raise WireError(f"a message of {body_bytes} bytes was announced; the limit is {MAX_BODY_BYTES}")
        end = _HEADER.size + body_bytes
        if len(self._received) < end:
            return None
        if num_descriptors > len(self._received_descriptors):
            raise WireError(f"{num_descriptors} descriptors were announced, {len(self._received_descriptors)} came")
        message = _decode(bytes(self._received[_HEADER.size : end]))
        del self._received[:end]
        descriptors = self._received_descriptors[:num_descriptors]
        del self._received_descriptors[:num_descriptors]
        return Frame(message, descriptors)

    # Waiting, and the end

    def wait(self, timeout_s: float, wake_descriptor: int = -1) -> None:
        """Block until the socket is ready, ``wake_descriptor`` can be read, or the time is over."""
        poll = select.poll()
        events = select.POLLIN
        if self.is_sending:
            events |= select.POLLOUT
        poll.register(self._socket, events)
        if wake_descriptor >= 0:
            poll.register(wake_descriptor, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)

    def shut_down(self) -> None:
        """End the connection for both sides; ``receive`` returns None from then on. ``close`` must still be called."""
        self._close_unsent_descriptors()
        self._unsent = memoryview(b"")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and the remaining descriptors."""
        for descriptor in self._received_descriptors:
            os.close(descriptor)
        self._received_descriptors = []
        self._close_unsent_descriptors()
        self._unsent = memoryview(b"")
        self._socket.close()


def _encode(message: LocalMessage) -> bytes:
    # Not with msgspec's own encoder: file names may contain bytes that are not UTF-8.
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()


def _decode(body: bytes) -> LocalMessage:
    try:
        message: LocalMessage = msgspec.convert(json.loads(body), LocalMessage)
    except (ValueError, RecursionError) as error:  # also msgspec.ValidationError
        raise WireError(f"the other end sent no message of this protocol: {error}") from error
    return message


def _descriptors_in(rights: bytes) -> list[int]:
    descriptors = array.array("i")
    whole_bytes = len(rights) - len(rights) % descriptors.itemsize
    descriptors.frombytes(rights[:whole_bytes])
    return descriptors.tolist()


def _copies(descriptors: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        for copy in copies:
            with contextlib.suppress(OSError):
                os.close(copy)
        raise
    return copies
