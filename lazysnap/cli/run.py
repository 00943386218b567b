"""``lazysnap run``: a command that is started again after a crash, warm."""

import argparse

from lazysnap.cli.output import Output, command_words
from lazysnap.warm.client import end_as
from lazysnap.warm.supervisor import Restarts, supervise


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the command until it ends well, and end as its last start does. Blocks."""
    words = command_words(args, "python train.py")
    end_as(supervise(words, Restarts(args.max_restarts, args.same_exit_within)))
