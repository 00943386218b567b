"""Called in place of Python: a program is forked from a ``zygote`` in the namespaces of the caller. Ends as it does.

usage: forked.py SOCKET [-u] SCRIPT [ARGUMENT ...]
"""

import contextlib
import json
import os
import signal
import socket
import sys


def main() -> None:
    path, *args = sys.argv[1:]
    request = {"args": args[args[0] == "-u" :], "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zygote:
        zygote.connect(path)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        socket.send_fds(zygote, [json.dumps(request).encode()], [1])
        pid = int(zygote.recv(64))

        def hand_on(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        signal.signal(signal.SIGTERM, hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        code = int(zygote.recv(64))
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
