"""Reads the memory of another node, from its ``PeerServer``."""

import contextlib
import socket
import time
from collections.abc import Iterator

import xxhash
from msgspec import Struct, msgpack

from lazysnap.errors import ConfigError, FormatError, KeeperError
from lazysnap.links.channel import Channel, connect, shut
from lazysnap.links.listener import Violation, reason
from lazysnap.links.messages import (
    MAX_READ_BYTES,
    Alive,
    Answer,
    Block,
    Finish,
    Finished,
    Open,
    Opened,
    PeerRefused,
    Read,
    Refusal,
    What,
)
from lazysnap.links.secret import Secret
from lazysnap.memory.slot_source import STALL_S

ANSWER_S = 120.0
"""A request without an answer for so long has failed, even if the peer says that it is alive: captures fill faster."""
_decoder: msgpack.Decoder[Answer] = msgpack.Decoder(Answer)


class PeerReader:
    """One connection to a peer. Not thread-safe.

    Every call may raise PeerRefused (the request failed at the peer) or KeeperError (the connection is closed then,
    and every later call raises it as well).
    """

    def __init__(self, secret: Secret, address: tuple[str, int], *, timeout_s: float = 10.0) -> None:
        """Connect. Blocks: at most ``timeout_s`` for each of connection and handshake.

        ``timeout_s``: a peer that is silent for so long counts as gone, at any time; one that says only that it is
        alive, for ``ANSWER_S``. Raises: KeeperError.
        """
        self._timeout_s = timeout_s
        self._peer = f"{address[0]}:{address[1]}"
        self.what: What | None = None
        """The thing that is read; ``None``: nothing is open."""
        self.size_bytes = 0
        self._socket: socket.socket | None = None
        with self._or_unreachable():
            self._socket = connect(address, secret, timeout_s)
            self._channel = Channel(self._socket, _decoder, timeout_s)

    def open(self, what: What) -> int:
        """Read this from now on; its size in bytes. Blocks: until the peer has it."""
        self.what = None
        with self._or_unreachable():
            answer = self._ask(Open(what))
            if not isinstance(answer, Opened):
                raise Violation(f"the answer to open is {answer}")
            self.what, self.size_bytes = what, answer.size_bytes
            return answer.size_bytes

    def read_from(self, what: What) -> None:
        """Like ``open``, unless this is open already."""
        if self.what != what:
            self.open(what)

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill ``out`` with what stands at ``offset``; xxh3_64 of it, computed by the peer and compared here.

        Blocks: until the bytes are there. Raises: FormatError, if other bytes arrived than the peer has; ConfigError.
        """
        out = out.cast("B")
        if not 1 <= len(out) <= MAX_READ_BYTES:
            raise ConfigError(f"a read has 1 to {MAX_READ_BYTES} bytes, got {len(out)}")
        with self._or_unreachable():
            answer = self._ask(Read(offset, len(out)))
            if not isinstance(answer, Block) or answer.length != len(out):
                raise Violation(f"the answer to a read of {len(out)} bytes is {answer}")
            self._channel.receive_into(out, self._timeout_s)
        if (got := xxhash.xxh3_64_intdigest(out)) != answer.checksum:
            raise FormatError(
                f"{self._peer}: bytes [{offset}, {offset + len(out)}) of {self.what}: xxh3_64 is {got:016x}, "
                f"the peer says {answer.checksum:016x}: they changed while they were read, or on their way"
            )
        return got

    def finish(self) -> None:
        """All was read: was it whole? Blocks: until the peer knows, which may take a training step or an evaluation.

        Raises: PeerRefused, if what was read is void.
        """
        with self._or_unreachable():
            answer = self._ask(Finish(), STALL_S + ANSWER_S)  # before that the peer itself gives up
            if not isinstance(answer, Finished):
                raise Violation(f"the answer to finish is {answer}")

    def interrupt(self) -> None:
        """A call in progress fails at once, and so does every later one. From any thread."""
        if self._socket is not None:
            shut(self._socket)

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()

    def _ask(self, request: Struct, answer_s: float | None = None) -> Answer:
        self._channel.send(request)
        deadline = time.monotonic() + (ANSWER_S if answer_s is None else answer_s)
        while isinstance(answer := self._channel.receive(self._timeout_s), Alive):
            if time.monotonic() > deadline:
                raise TimeoutError
        if isinstance(answer, Refusal):
            raise PeerRefused(f"{self._peer}: {answer.text}")
        return answer

    @contextlib.contextmanager
    def _or_unreachable(self) -> Iterator[None]:
        """After anything but a refusal nobody knows which bytes come next: the connection is closed."""
        try:
            yield
        except PeerRefused:
            raise
        except (OSError, EOFError, Violation) as error:
            self.close()
            raise KeeperError(f"{self._peer} cannot be read from: {reason(error)}") from error
        except BaseException:
            self.close()
            raise
