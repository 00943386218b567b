"""The proof of both ends of a local connection that they have the same owner, before anything else is said."""

import socket
from collections.abc import Callable

from lazysnap.errors import KeeperUnavailable
from lazysnap.keeper.messages import Connection
from lazysnap.links.listener import Violation
from lazysnap.links.secret import Secret, handshake

_PROTOCOL = b"lazykeep", 1


class Greeting:
    """One end of the handshake (``links.secret``). No message may be sent or read before it is over."""

    def __init__(self, connection: Connection, secret: Secret, *, is_server: bool) -> None:
        """Begin it. Raises: OSError, if the other end is gone."""
        self._connection = connection
        self._steps = handshake(secret, _PROTOCOL, is_server=is_server)
        self._received = b""
        data, self._missing = next(self._steps)
        connection.sock.send(data)

    def read(self) -> bool:
        """Read what is there. True once the other end has proven itself.

        Raises: KeeperUnavailable, if it cannot; OSError, if it is gone.
        """
        sock = self._connection.sock
        try:
            # Not a byte more: messages with descriptors may follow.
            data = sock.recv(self._missing - len(self._received), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError("the other end is gone")
        self._received += data
        while len(self._received) == self._missing:
            try:
                data, self._missing = self._steps.send(self._received)
            except StopIteration:
                return True
            except Violation as error:
                raise KeeperUnavailable(f"process {self._connection.peer_pid} is refused: {error}") from error
            self._received = b""
            if data:
                sock.send(data)
        return False


def prove(connection: Connection, secret: Secret, wait: Callable[[], bool], *, is_server: bool = False) -> bool:
    """Do the whole handshake. Blocks: in ``wait``, which is true when something can be read, and false to give up.

    Raises: KeeperUnavailable, if the other end cannot prove itself; OSError, if it is gone.
    """
    greeting = Greeting(connection, secret, is_server=is_server)
    while wait():
        if greeting.read():
            return True
    return False
