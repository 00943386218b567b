"""Reads the memory of another node from its keeper, by blocking calls: for restores, and for jobs on threads."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import xxhash
from msgspec import msgpack

from lazysnap.errors import ConfigError, FormatError, KeeperError
from lazysnap.memory.capture_reader import STALL_S
from lazysnap.peers.messages import MAX_READ_BYTES, Answer, Block, PeerRefused, Read, Subject
from lazysnap.peers.secret import handshake
from lazysnap.peers.wire import (
    FAILURES,
    TIMEOUTS,
    Violation,
    frame,
    keep_alive,
    left_s,
    reason,
    receive_exactly,
    receive_message,
)

_SHORTEST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.2
"""Seconds until bytes that were not there yet are requested again: the pause doubles from the first to the second."""
_decoder: "msgpack.Decoder[Answer]" = msgpack.Decoder(Answer)


def do_nothing() -> None:
    """Do nothing, while bytes are waited for."""


class PeerReader:
    """Reads of one keeper, over one connection, which is made when it is needed. Not thread-safe.

    Every call may raise PeerRefused (the keeper answered that it cannot give this) or KeeperError (it is not reached).
    The next call tries again. What is read must stay the same captures for as long as the reader lives.

    Example::

        reader = PeerReader(secret, ("10.0.0.2", 4711))
        out = memoryview(bytearray(reader.size(what)))
        reader.read_into(what, 0, out)
        reader.close()
    """

    def __init__(
        self,
        secret: str,
        address: tuple[str, int],
        *,
        beat: Callable[[], None] = do_nothing,
        timeout_s: float = 10.0,
        patience_s: float = STALL_S,
    ) -> None:
        """Set the keeper to read from. Does not block.

        Args:
            secret: the secret of the start.
            address: where the keeper listens.
            beat: called repeatedly while bytes are not available yet. Its errors end the call.
            timeout_s: seconds after which a silent keeper counts as dead.
            patience_s: seconds to wait for bytes that are not available yet. Default: as long as a capture may stand
                still.
        """
        self._secret = secret
        self._address = address
        self._beat = beat
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._peer = f"{address[0]}:{address[1]}"
        self._connection: socket.socket | None = None
        self._facts: dict[Subject, tuple[int, int]] = {}
        """Size and identity of each subject. All answers about one subject must agree on them."""
        self._lock = threading.Lock()
        """Held while the connection is replaced: ``interrupt`` comes from any thread."""
        self._is_interrupted = False

    def connect(self) -> None:
        """Connect, if there is no connection. Blocks: at most ``timeout_s`` for each of connection and handshake."""
        try:
            self._connected()
        except FAILURES as error:
            raise self._unreachable(error) from error

    def size(self, subject: Subject, patience_s: float | None = None) -> int:
        """Return the number of readable bytes of a subject. Blocks: until the keeper has it, at most ``patience_s``."""
        return self._read(Read(subject, 0, 0), memoryview(b""), patience_s).size_bytes

    def read_into(self, subject: Subject, offset: int, out: memoryview) -> int:
        """Fill ``out`` with the bytes at ``offset``.

        Blocks: until the bytes are available. For the last byte: until all captures are whole.
        Returns: xxh3_64 of the bytes, computed by the keeper and compared here.
        Raises: PeerRefused, also if the capture was overwritten while it was sent; FormatError, if bytes were damaged
        in transit; ConfigError.
        """
        out = out.cast("B")
        if not 1 <= len(out) <= MAX_READ_BYTES:
            raise ConfigError(f"a read has 1 to {MAX_READ_BYTES} bytes, got {len(out)}")
        block = self._read(Read(subject, offset, len(out)), out)
        checksum = xxhash.xxh3_64_intdigest(out)
        if checksum != block.checksum:
            self.size(subject, patience_s=0.0)  # refused, if it is another capture by now
            raise FormatError(
                f"{self._peer}: bytes [{offset}, {offset + len(out)}) of {subject}: xxh3_64 is {checksum:016x}, "
                f"the peer says {block.checksum:016x}: they were damaged on their way"
            )
        return checksum

    def finish(self, subject: Subject) -> None:
        """Check that all bytes that were read are of captures that are whole now. Otherwise they are invalid.

        Blocks: until they are whole, which may take a training step or an evaluation.
        """
        size_bytes = self.size(subject)
        if size_bytes:
            self.read_into(subject, size_bytes - 1, memoryview(bytearray(1)))

    def interrupt(self) -> None:
        """Make a call in progress fail at once, and every later one. Thread-safe."""
        with self._lock:
            self._is_interrupted = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection. A later call makes another one."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    # One read

    def _read(self, read: Read, out: memoryview, patience_s: float | None = None) -> Block:
        """Return the answer to a read. Retries while the bytes are not available yet."""
        give_up_at = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        pause_s = _SHORTEST_PAUSE_S
        while True:
            answer = self._exchange(read, out)
            if isinstance(answer, Block):
                self._check_facts(read.subject, answer)
                return answer
            if not answer.is_not_yet or time.monotonic() >= give_up_at:
                raise PeerRefused(f"{self._peer}: {answer.text}")
            self._beat()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _check_facts(self, subject: Subject, block: Block) -> None:
        facts = (block.size_bytes, block.identity)
        if self._facts.setdefault(subject, facts) != facts:
            raise PeerRefused(f"{self._peer}: {subject} was captured again while it was read")

    def _exchange(self, read: Read, out: memoryview) -> Answer:
        """Send a read and receive its answer."""
        # The other side closes idle connections, and an earlier keeper's connection is closed, too.
        may_be_stale = self._connection is not None
        try:
            try:
                return self._exchange_once(read, out)
            except (OSError, EOFError) as error:
                if not may_be_stale or self._is_interrupted or isinstance(error, TIMEOUTS):
                    raise
                return self._exchange_once(read, out)
        except FAILURES as error:
            raise self._unreachable(error) from error

    def _exchange_once(self, read: Read, out: memoryview) -> Answer:
        connection = self._connected()
        try:
            connection.settimeout(self._timeout_s)
            connection.sendall(frame(read))
            answer = receive_message(connection, _decoder, self._timeout_s)
            if isinstance(answer, Block):
                if answer.length != len(out):
                    raise Violation(f"the answer to a read of {len(out)} bytes is {answer}")
                self._receive_into(connection, out)
            return answer
        except BaseException:  # the next bytes are undefined
            self.close()
            raise

    def _receive_into(self, connection: socket.socket, out: memoryview) -> None:
        """Fill ``out``. Blocks: while bytes arrive, at most ``timeout_s`` without any."""
        connection.settimeout(self._timeout_s)
        num_received = 0
        while num_received < len(out):
            count = connection.recv_into(out[num_received:])
            if not count:
                raise EOFError
            num_received += count

    # The connection

    def _connected(self) -> socket.socket:
        """Return the connection; make one if there is none."""
        if self._connection is not None:
            return self._connection
        if self._is_interrupted:
            raise ConnectionAbortedError("it was interrupted")
        connection = socket.create_connection(self._address, self._timeout_s)
        try:
            keep_alive(connection)
            self._authenticate(connection)
            with self._lock:
                if self._is_interrupted:
                    raise ConnectionAbortedError("it was interrupted")
                self._connection = connection
        except BaseException:
            connection.close()
            raise
        return connection

    def _authenticate(self, connection: socket.socket) -> None:
        """Authenticate both ends. Raises: Violation, if the other end cannot prove itself."""
        deadline = time.monotonic() + self._timeout_s
        steps = handshake(self._secret, is_server=False)
        outgoing, expected_bytes = next(steps)
        while True:
            connection.settimeout(left_s(deadline))
            connection.sendall(outgoing)
            received = bytes(receive_exactly(connection, expected_bytes, deadline))
            try:
                outgoing, expected_bytes = steps.send(received)
            except StopIteration:
                return

    def _unreachable(self, error: BaseException) -> KeeperError:
        return KeeperError(f"{self._peer} cannot be read from: {reason(error)}")
