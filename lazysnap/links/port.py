"""A port for the keepers of a node."""

import socket


class ReservedPort:
    """A port of one address of this machine, bound and not listened at: one keeper after the other may listen there."""

    def __init__(self, host: str) -> None:
        """Raises: OSError, if there is none."""
        if host in ("0.0.0.0", "::"):
            raise OSError("it means every interface, name the address of one")
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise

    @property
    def number(self) -> int:
        """The port."""
        return int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Let go of it. May be called again."""
        self._socket.close()
