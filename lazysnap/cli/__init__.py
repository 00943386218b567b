"""The command line ``lazysnap``: one module per command, imported when the command runs."""

from lazysnap.cli.commands import main

__all__ = ["main"]
