"""Ports for ranks to meet at, and one that nobody answers at."""

import contextlib
import random
import socket
from collections.abc import Iterator

_CHANCE = random.SystemRandom()


def free_port() -> int:
    """A port that nobody has now. None of those that the kernel gives to connections: it might give it away again."""
    while True:
        port = _CHANCE.randrange(10_000, 20_000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """The URL of a server that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"ftp://127.0.0.1:{listener.getsockname()[1]}/run"
