"""One end of a connection to a keeper, by hand."""

import pathlib
import socket
import ssl
import struct

import msgspec

WAIT_S = 30.0
"""For the other end to close: less than the deadlines by which it closes what it could not refuse."""


def tls(address, certificate):
    """A raw connection of one who has the certificate."""
    connection = socket.create_connection(address, timeout=WAIT_S)
    return certificate.context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(connection)


def frame(message):
    data = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(data)) + data


def is_closed(connection):
    """Whether the other end closes; what it had sent is read first."""
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
