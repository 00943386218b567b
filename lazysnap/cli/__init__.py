"""The command line ``lazysnap``: one module per command, imported when the command runs."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: see ``commands.main``. ``worker --`` skips argparse, whose import lengthens a restart."""
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments)
    if words[:2] == ["worker", "--"] and len(words) > 2:
        from lazysnap.warm.client import main as worker

        worker(words[2:])
    from lazysnap.cli.commands import main as command

    return command(words)


__all__ = ["main"]
