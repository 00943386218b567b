"""What the names of a shard and of its manifest begin with: whose they are, one rank's or those of a node."""

import re
from dataclasses import dataclass

_STEM = re.compile(r"(rank|node)-(\d{5,10})-of-(\d{5,10})")
_SUFFIXES = ("safetensors", "json")


@dataclass(frozen=True)
class Stem:
    """One of so many ranks, or of so many nodes."""

    kind: str
    """``rank`` or ``node``."""
    index: int
    count: int

    @classmethod
    def of_rank(cls, rank: int, world_size: int) -> "Stem":
        """``rank-00003-of-00008``."""
        return cls("rank", rank, world_size)

    @classmethod
    def of_node(cls, node: int, nodes: int) -> "Stem":
        """``node-00000-of-00002``."""
        return cls("node", node, nodes)

    @classmethod
    def parse(cls, text: str) -> "Stem | None":
        """``None`` for anything else."""
        match = _STEM.fullmatch(text)
        return cls(match[1], int(match[2]), int(match[3])) if match else None

    @property
    def text(self) -> str:
        """As it stands in a name."""
        return f"{self.kind}-{self.index:05d}-of-{self.count:05d}"

    @property
    def is_node(self) -> bool:
        """Whether the files hold all ranks of a node."""
        return self.kind == "node"

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
