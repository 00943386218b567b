"""``python -m lazysnap.keeper --address HEX``: started by the first trainer of a job on a node."""

import argparse
import logging
import os
import signal

from lazysnap.keeper.process import run_keeper


def main() -> None:
    """Detach from whoever started this, then keep."""
    parser = argparse.ArgumentParser(prog="python -m lazysnap.keeper")
    parser.add_argument("--address", required=True, help="abstract Unix socket address, in hexadecimal")
    parser.add_argument("--foreground", action="store_true", help="do not detach")
    arguments = parser.parse_args()
    if not arguments.foreground:
        _detach()
    log = os.environ.get("LAZYSNAP_KEEPER_LOG")
    if log:
        logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    status = run_keeper(bytes.fromhex(arguments.address).decode())
    logging.shutdown()
    # Not sys.exit(): it would wait for a thread that hangs in a dead file system.
    os._exit(status)


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
