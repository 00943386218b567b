"""One end of a connection to a keeper, by hand."""

import contextlib
import hashlib
import hmac
import os
import pathlib
import socket
import struct

import msgspec
import xxhash

from lazysnap.peers.wire import PROTOCOL

WAIT_S = 30.0
"""For the other end to close: less than the deadlines by which it closes what it could not refuse."""


def preamble(protocol=PROTOCOL[1]):
    return struct.pack("!8sH", b"lazysnap", protocol)


def exactly(connection, length):
    received = b""
    while len(received) < length and (data := connection.recv(length - len(received))):
        received += data
    return received


def prove(connection, secret, *, is_server=False, nonce=None):
    """The handshake, as ``peers.secret`` describes it; True if the other end has the secret."""
    opening, nonce = preamble(), nonce or os.urandom(32)
    connection.sendall(opening + nonce)
    theirs = exactly(connection, 42)
    assert theirs[:10] == opening
    nonces = theirs[10:] + nonce if is_server else nonce + theirs[10:]

    def proof(role):
        return hmac.new(bytes.fromhex(secret), role + opening + nonces, hashlib.sha256).digest()

    connection.sendall(proof(b"server" if is_server else b"client"))
    return exactly(connection, 32) == proof(b"client" if is_server else b"server")


def authenticated(address, secret):
    """A raw connection of one who has the secret."""
    connection = socket.create_connection(address, timeout=WAIT_S)
    try:
        assert prove(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def raw_frame(data):
    return struct.pack("!IQ", len(data), xxhash.xxh3_64_intdigest(data)) + data


def frame(message):
    return raw_frame(msgspec.msgpack.encode(message))


def announced(length):
    """The head of a frame that does not follow."""
    return struct.pack("!IQ", length, 0)


def is_closed(connection):
    """True if the other end closes; what it had sent is read first."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def peak_kib(*, since_now=False):
    """The most memory that this process had; ``since_now``: what it had earlier is forgotten."""
    if since_now:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def refusals(caplog):
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


def sockets_at(port):
    """The TCP sockets of this process that one end of has this port."""
    suffix = f":{port:04X}"
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    at_port = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(suffix) or row[2].endswith(suffix)}
    own = set()
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(descriptor))
    return own & at_port
