"""``python -m lazysnap.keeper --socket PATH``: started by the first trainer of a job on a node."""

import argparse
import contextlib
import logging
import os
import signal
import socket

from lazysnap.keeper.runtime import KeeperFiles, KeeperLock


def main() -> None:
    """Detach from the process that started this one, and run the keeper."""
    parser = argparse.ArgumentParser(prog="python -m lazysnap.keeper")
    parser.add_argument("--socket", required=True, help="path of the socket at which the keeper listens")
    for name in ("--job", "--node"):
        parser.add_argument(name, help="shown in process lists; only the socket is used")
    parser.add_argument("--lock", type=int, help="descriptor of the lock file, which is locked")
    parser.add_argument("--listener", type=int, help="descriptor of a socket that is bound to the path already")
    parser.add_argument("--trainer", type=int, help="descriptor of a connection to the trainer that starts it")
    parser.add_argument("--foreground", action="store_true", help="do not detach")
    arguments = parser.parse_args()
    # These signals may reach the whole job, also during this start; ``Keeper.run`` handles them.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    if not arguments.foreground:
        _detach()
    trainer = None if arguments.trainer is None else _inherited(arguments.trainer)
    files = KeeperFiles.of_socket(arguments.socket)
    if arguments.listener is not None:
        os.set_inheritable(arguments.lock, False)
        lock = KeeperLock(files, arguments.lock)
        listener = _inherited(arguments.listener)
    else:
        own_lock = files.try_lock()
        if own_lock is None:
            os._exit(1)  # another keeper serves this job already
        lock = own_lock
        listener = lock.bind()
    listener.listen(64)
    # Imported after detaching: the import takes a while, and a launcher that ends may kill its children.
    from lazysnap.keeper.loop import Keeper
    from lazysnap.keeper.trouble import Trouble

    trouble = Trouble(files.log_path)
    trouble.watch()
    try:
        _name_process()
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        status = Keeper(lock, trouble).run(listener, trainer)
        if status == 0:
            lock.remove()
    except Exception:
        logging.getLogger("lazysnap.keeper").exception("the keeper ends")
        os._exit(1)
    logging.shutdown()
    # Not sys.exit(), which would wait for a thread that hangs in a dead file system.
    os._exit(status)


def _inherited(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return sock


def _name_process() -> None:
    """Set the process name for top and ``ps -o comm``."""
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
