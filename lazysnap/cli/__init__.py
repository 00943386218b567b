"""The command line ``lazysnap``: one module per command, imported when the command runs."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; see ``commands.main``. ``worker`` skips argparse, whose import would lengthen each restart."""
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments)
    if words[:1] == ["worker"] and words[1:2] not in (["--help"], ["-h"], ["--json"], []):
        from lazysnap.warm.client import main as worker

        user_command = words[1:]
        if user_command[0] == "--":
            user_command = user_command[1:]
        if user_command:
            worker(user_command)
    from lazysnap.cli.commands import main as command

    return command(words)


__all__ = ["main"]
