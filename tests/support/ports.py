"""Ports for ranks to meet at."""

import random
import socket

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
