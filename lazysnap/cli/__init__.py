"""The command line ``lazysnap``: one module per command, imported when the command runs."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; see ``commands.main``. ``worker`` skips argparse, whose import would lengthen each restart."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["worker"] and words[1:2] not in (["--help"], ["-h"], ["--json"], []):
        from lazysnap.warm.client import main as worker

        worker(words[2:] if words[1] == "--" else words[1:])
    from lazysnap.cli.commands import main as command

    return command(words)


__all__ = ["main"]
