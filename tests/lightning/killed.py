"""A training of its own process, for tests that kill it: ``killed.py DIRECTORY STEP THREADS``."""

import os
import signal
import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from test_callback import DieAt, fit  # noqa: E402


def main() -> None:
    directory, step, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))  # with another number the bits are others
    fit(directory, DieAt(int(step), lambda: os.kill(os.getpid(), signal.SIGKILL)))


if __name__ == "__main__":
    main()
