"""What a network is like, as programs on it see it.

usage: wire.py serve | ask HOST COUNT | pour HOST BYTES

``serve`` answers the others: datagrams, and connections of which it reads all. ``ask`` prints how long an answer takes,
half of them at least, and how many of COUNT came back; ``pour`` bytes per second.
"""

import selectors
import socket
import statistics
import sys
import time

PORT = 7
SILENCE_S = 0.5


def serve() -> None:
    datagrams, listener = socket.socket(type=socket.SOCK_DGRAM), socket.create_server(("", PORT))
    datagrams.bind(("", PORT))
    with selectors.DefaultSelector() as selector:
        selector.register(datagrams, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        print("up", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is datagrams:
                    datagrams.sendto(*datagrams.recvfrom(2048))
                elif key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif not key.fileobj.recv(1 << 20):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


def ask(host: str, count: int) -> None:
    sent, took = {}, []
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.connect((host, PORT))
        sock.settimeout(0.0005)
        last = time.monotonic()
        while len(took) < count and time.monotonic() - last < SILENCE_S:
            if len(sent) < count:
                sent[len(sent)] = last = time.monotonic()
                sock.send(str(len(sent) - 1).encode())
            try:
                number = int(sock.recv(2048))
            except (TimeoutError, ConnectionError):
                continue
            last = time.monotonic()
            took.append(last - sent[number])
    print(statistics.median(took) if took else 0.0, len(took))


def pour(host: str, size: int) -> None:
    started = time.monotonic()
    with socket.create_connection((host, PORT)) as sock:
        sock.sendall(bytes(size))
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)  # when all was read
    print(size / (time.monotonic() - started))


if __name__ == "__main__":
    {"serve": serve, "ask": ask, "pour": pour}[sys.argv[1]](*sys.argv[2:3], *map(int, sys.argv[3:]))
