"""The command line: ``lazysnap ls``, ``verify``, ``show``, ``prune``, ``copy``, ``export``, ``keeper``."""

from lazysnap.cli.commands import main

__all__ = ["main"]
