"""Called in place of Python: a program is forked from a ``zygote`` in the namespaces of the caller. Ends as it does.

usage: forked.py SOCKET [-u] SCRIPT [ARGUMENT ...]
       forked.py SOCKET -c PROGRAM [ARGUMENT ...]
       forked.py SOCKET -m MODULE [ARGUMENT ...]

A module is run by Python itself, unless its package is in ``FORKED_PACKAGES``.
"""

import contextlib
import json
import os
import signal
import socket
import sys

HANDED_ON = [signal.SIGTERM, signal.SIGUSR1]
FORKED_PACKAGES = ("benchmarks",)
"""A keeper, for one, must be a process that never had torch."""


def main() -> None:
    path, *args = sys.argv[1:]
    if args[0] == "-m" and args[1].split(".")[0] not in FORKED_PACKAGES:
        os.execv(sys.executable, [sys.executable, *args])
    request = {"args": args[args[0] == "-u" :], "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zygote:
        zygote.connect(path)
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
        socket.send_fds(zygote, [json.dumps(request).encode()], [0, 1, 2, os.open(".", os.O_DIRECTORY)])
        pid = int(zygote.recv(64))

        def hand_on(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for one in HANDED_ON:
            signal.signal(one, hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        code = int(zygote.recv(64))
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
