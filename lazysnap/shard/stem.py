"""What the names of a shard and of its manifest begin with: which rank's they are, and of how many."""

import re
from dataclasses import dataclass

from lazysnap.shard.limits import MAX_RANKS

_STEM = re.compile(r"rank-([0-9]{5,7})-of-([0-9]{5,7})")
_SUFFIXES = ("safetensors", "json")


@dataclass(frozen=True)
class Stem:
    """One of so many ranks."""

    rank: int
    world_size: int

    @classmethod
    def parse(cls, text: str) -> "Stem | None":
        """``None`` for anything that this class would not write, or that is beyond the format's limits."""
        match = _STEM.fullmatch(text)
        if match is None:
            return None
        stem = cls(int(match[1]), int(match[2]))
        return stem if stem.rank < stem.world_size <= MAX_RANKS and stem.text == text else None

    @property
    def text(self) -> str:
        """As it stands in a name: ``rank-00003-of-00008``."""
        return f"rank-{self.rank:05d}-of-{self.world_size:05d}"

    @property
    def shard(self) -> str:
        """Name of the shard."""
        return f"{self.text}.safetensors"

    @property
    def manifest(self) -> str:
        """Name of the manifest."""
        return f"{self.text}.json"


def parse_file_name(name: str) -> tuple[Stem, str] | None:
    """Stem and suffix (``safetensors`` or ``json``) of a shard's or manifest's name, ``None`` for any other name."""
    text, _, suffix = name.rpartition(".")
    stem = Stem.parse(text)
    return (stem, suffix) if stem is not None and suffix in _SUFFIXES else None
