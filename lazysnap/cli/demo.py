"""``lazysnap demo``: chaos of a small transformer, in a directory that goes when all is well."""

import argparse
import os
import shutil
import sys
import tempfile

from lazysnap.cli import chaos
from lazysnap.cli.output import OK, Output


def run(args: argparse.Namespace, output: Output) -> int:
    """Train twice undisturbed, then kill and resume, with and without the keeper. Blocks for a minute or two.

    Returns 1 if a result differs. Raises: ChaosFailed.
    """
    args.words = [sys.executable, "-m", "lazysnap.cli.demo_training"]
    args.faults = ["kill", "both"]
    args.seed = 1603
    args.result = args.may_lose = args.deadline = None
    output.say(
        "a small transformer is trained, with each step in memory and each 20th on disk, and killed with SIGKILL"
    )
    before = os.getcwd()
    place = tempfile.mkdtemp(prefix="lazysnap-demo-")
    os.chdir(place)
    try:
        code = chaos.run(args, output)
    finally:
        os.chdir(before)
    if code == OK:
        shutil.rmtree(place)
    return code
