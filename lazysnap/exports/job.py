"""One export: its place and format, the choices of the user, and a display of the progress."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from lazysnap.errors import ConfigError
from lazysnap.levels.files import pwrite_all
from lazysnap.levels.source import ByteCounter, no_progress
from lazysnap.snapshots.reads import Reads, Write

Bar = Callable[[str, int], AbstractContextManager[ByteCounter]]
"""A display of progress: receives a title and the bytes to do, and yields a function that receives new done bytes."""


def behind(handle: int, start: int) -> Write:
    """Return a ``Write`` into an open file whose offsets count from ``start``."""

    def write(offset: int, data: memoryview) -> None:
        pwrite_all(handle, start + offset, data)

    return write


@contextlib.contextmanager
def no_bar(title: str, total: int) -> Iterator[ByteCounter]:
    """Show no progress: a ``Bar``."""
    yield no_progress


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """One export."""

    path: str
    """The place of the result."""
    format: str
    only: str | None = None
    """safetensors, huggingface: only the tensors below this path in the state, without that prefix."""
    config: str | None = None
    """huggingface: a directory whose ``config.json``, generation config and tokenizer files are copied."""
    bar: Bar = no_bar

    def check(self) -> None:
        """Raises: ConfigError, for a choice that the format does not have."""
        if self.only is not None and self.format not in ("safetensors", "huggingface"):
            raise ConfigError(f"--only chooses tensors for safetensors and huggingface, not for {self.format}")
        if self.config is not None and self.format != "huggingface":
            raise ConfigError(f"--config is for huggingface, not for {self.format}")

    def fill(self, reads: Reads) -> None:
        """Read the snapshot into the files of an export. Blocks. Raises: as ``Reads.run``."""
        with self.bar("exporting", reads.size_bytes) as progress:
            reads.run(progress)
