"""A training of its own process, for tests that kill it: ``killed.py DIRECTORY STEP``."""

import os
import signal
import sys
import warnings

warnings.simplefilter("ignore")

from test_callback import DieAt, fit  # noqa: E402


def main() -> None:
    directory, step = sys.argv[1:]
    fit(directory, DieAt(int(step), lambda: os.kill(os.getpid(), signal.SIGKILL)))


if __name__ == "__main__":
    main()
