"""The secret of a start, and the handshake with which two processes authenticate.

All processes of one start share the secret, a text of hexadecimal digits. A process that has it belongs to that start.

Both ends do the same at the same time::

    letters (8 bytes), protocol number (2 bytes, big-endian), nonce (32 random bytes)
    proof (32 bytes)

A proof is HMAC-SHA256 with the secret as its key, of the role of its sender (``client``: who connected; ``server``),
letters and number, the client's nonce and the server's nonce. So it is valid only for this connection and this role.
What follows is neither encrypted nor signed: frames and blocks carry checksums against damage, not against an attacker
in the network.
"""

import hmac
import secrets
import struct
from collections.abc import Generator

from lazysnap.peers.wire import PROTOCOL, Violation

_PREAMBLE = struct.Struct("!8sH")
_SECRET_BYTES = 32
_NONCE_BYTES = 32
_PROOF_BYTES = 32


def draw_secret() -> str:
    """Return a new secret. Rank 0 draws it, and the process group distributes it."""
    return secrets.token_hex(_SECRET_BYTES)


Handshake = Generator[tuple[bytes, int], bytes, None]
"""Yields the bytes to send and the number of bytes to read, which are sent into it. Ends after the authentication."""


def handshake(secret: str, *, is_server: bool) -> Handshake:
    """Authenticate both ends to each other.

    Raises: Violation, if the other end speaks another protocol or lacks the secret.
    """
    preamble = _PREAMBLE.pack(*PROTOCOL)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    received = yield preamble + own_nonce, len(preamble)
    if received != preamble:
        letters, number = _PREAMBLE.unpack(received)
        expected = f"{PROTOCOL[0]!r} {PROTOCOL[1]}"
        raise Violation(f"protocol {letters!r} {number}, expected {expected}: same lazysnap on all nodes?")
    other_nonce = yield b"", _NONCE_BYTES
    if is_server:
        signed = preamble + other_nonce + own_nonce
        own_proof = _proof(secret, b"server", signed)
        expected_proof = _proof(secret, b"client", signed)
    else:
        signed = preamble + own_nonce + other_nonce
        own_proof = _proof(secret, b"client", signed)
        expected_proof = _proof(secret, b"server", signed)
    proof = yield own_proof, _PROOF_BYTES
    if not hmac.compare_digest(proof, expected_proof):
        raise Violation("it does not have the secret of this start")


def _proof(secret: str, role: bytes, signed: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), role + signed, "sha256")
