"""Positions of data loaders and states of random generators, and how a restart reaches them again."""

from lazysnap.data.position import Position
from lazysnap.data.resumable import ResumableLoader, make_resumable, with_position

__all__ = ["Position", "ResumableLoader", "make_resumable", "with_position"]
