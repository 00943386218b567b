"""The secret of a start, and the handshake by which two processes prove that they have it.

Both ends do the same at the same time::

    letters (8 bytes), protocol number (2 bytes, big-endian), nonce (32 random bytes)
    proof (32 bytes)

A proof is HMAC-SHA256 with the secret as its key, of the role of its sender (``client``: who connected; ``server``),
letters and number, the client's nonce and the server's nonce. So it is of use for this connection and this role only.
What follows is neither encrypted nor signed: frames and blocks carry checksums against damage, not against an attacker
in the network.
"""

import hmac
import secrets
import struct
from collections.abc import Generator
from dataclasses import dataclass, field

from lazysnap.links.listener import Violation

_PREAMBLE = struct.Struct("!8sH")
_SECRET_BYTES = _NONCE_BYTES = 32
_PROOF_BYTES = 32


@dataclass(frozen=True)
class Secret:
    """The secret that all processes of one start share. Whoever has it belongs to that start."""

    hex: str = field(repr=False)


def draw_secret() -> Secret:
    """Return a new secret: rank 0 draws it, and the process group hands it over."""
    return Secret(secrets.token_hex(_SECRET_BYTES))


Handshake = Generator[tuple[bytes, int], bytes, None]
"""Yields the bytes to send and how many bytes to read then; these are sent into it. It ends when all is proven."""


def handshake(secret: Secret, protocol: tuple[bytes, int], *, is_server: bool) -> Handshake:
    """Prove this end to the other one, and have the other one prove itself.

    ``protocol``: letters and number. Raises: Violation, if the other end speaks another protocol or lacks the secret.
    """
    preamble, nonce = _PREAMBLE.pack(*protocol), secrets.token_bytes(_NONCE_BYTES)
    received = yield preamble + nonce, len(preamble)
    if received != preamble:
        expected = f"{protocol[0]!r} {protocol[1]}"
        letters, number = _PREAMBLE.unpack(received)
        raise Violation(f"protocol {letters!r} {number}, expected {expected}: same lazysnap on all nodes?")
    theirs = yield b"", _NONCE_BYTES
    nonces = bytes(theirs) + nonce if is_server else nonce + bytes(theirs)
    roles = (b"server", b"client") if is_server else (b"client", b"server")
    own, expected_proof = (hmac.digest(bytes.fromhex(secret.hex), r + preamble + nonces, "sha256") for r in roles)
    proof = yield own, _PROOF_BYTES
    if not hmac.compare_digest(proof, expected_proof):
        raise Violation("it does not have the secret of this start")
