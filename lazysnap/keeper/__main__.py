"""``python -m lazysnap.keeper --address HEX``: started by the first trainer of a job on a node."""

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazysnap.keeper.trouble import Trouble


def main() -> None:
    """Detach from whoever started this, then keep."""
    parser = argparse.ArgumentParser(prog="python -m lazysnap.keeper")
    parser.add_argument("--address", required=True, help="abstract Unix socket address, in hexadecimal")
    for name in ("--job", "--node"):
        parser.add_argument(name, help="for people who list processes; the address alone is used")
    parser.add_argument("--listener", type=int, help="descriptor of a socket that has the address already")
    parser.add_argument("--trainer", type=int, help="descriptor of a connection to the trainer that starts it")
    parser.add_argument("--foreground", action="store_true", help="do not detach")
    arguments = parser.parse_args()
    # They come to the whole job, also while this starts; ``run_keeper`` takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    if not arguments.foreground:
        _detach()
    trainer = None if arguments.trainer is None else _inherited(arguments.trainer)
    if arguments.listener is not None:
        listener = _inherited(arguments.listener)
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(bytes.fromhex(arguments.address).decode())
        except OSError:
            os._exit(1)  # another keeper serves this job already
    listener.listen(64)
    # Only now: a launcher that ends may kill all of its children's children, and importing takes a while.
    from lazysnap.keeper.trouble import Trouble

    log = os.environ.get("LAZYSNAP_KEEPER_LOG")
    if log:
        logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    trouble = Trouble(bytes.fromhex(arguments.address).decode())
    trouble.watch()
    try:
        _keep(listener, trainer, trouble)
    except Exception:
        logging.getLogger("lazysnap.keeper").exception("the keeper ends")
        os._exit(1)
    logging.shutdown()
    # Not sys.exit(): it would wait for a thread that hangs in a dead file system.
    os._exit(0)


def _inherited(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return sock


def _keep(listener: socket.socket, trainer: socket.socket | None, trouble: "Trouble") -> None:
    from lazysnap.keeper.identity import KEY
    from lazysnap.keeper.server import run_keeper
    from lazysnap.links.secret import Secret

    # Without one it serves nobody but who starts it.
    secret = Secret(os.environ.pop(KEY, "") or secrets.token_hex(32))
    _name_process()
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    run_keeper(listener, secret, trainer, trouble)


def _name_process() -> None:
    """The name that top and ``ps -o comm`` show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write("lazysnap-keeper")


def _detach() -> None:
    """Leave the trainer's session and process tree: launchers kill both."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")


if __name__ == "__main__":
    main()
