"""Where data loaders stand and which random numbers they draw, and how a restart gets them there."""

from lazysnap.data.other_loader import with_position
from lazysnap.data.position import Position, make_resumable
from lazysnap.data.resumable import ResumableLoader

__all__ = ["Position", "ResumableLoader", "make_resumable", "with_position"]
