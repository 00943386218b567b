"""Where each tensor of a snapshot lies: in the shard of a rank, or in the image of immutable tensors beside it."""

import contextlib
from dataclasses import dataclass
from typing import Any

from lazysnap.errors import ConfigError, ShardCorrupt
from lazysnap.levels.shards import ShardPlace
from lazysnap.levels.store import SnapshotStore
from lazysnap.levels.verified import VerifiedReader
from lazysnap.resolver import RestartPlan
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, Manifest

SHARD, FROZEN = "shard", "frozen"


@dataclass(frozen=True)
class Image:
    """A committed file of tensors whose header was read and verified."""

    kind: str
    """``shard`` or ``frozen``."""
    reader: VerifiedReader
    layout: Layout

    @property
    def manifest(self) -> Manifest:
        """What was committed with it."""
        return self.reader.manifest

    @classmethod
    def open(cls, kind: str, place: ShardPlace, manifest: Manifest) -> "Image":
        """Blocks: reads the blocks of the header. Raises: ShardCorrupt, FileNotFoundError, LevelUnavailable."""
        reader = VerifiedReader(place, manifest)
        try:
            head = reader.read(0, manifest.header_bytes)
            return cls(kind, reader, manifest.layout(head, place.where))
        except BaseException:
            reader.close()
            raise


@dataclass(frozen=True)
class Located:
    """A tensor that was found."""

    image: Image
    stored: str
    """Its name in the image: another one than it was asked for by, if it is tied."""
    spec: TensorSpec
    offset: int
    logical: str | None
    """Its dtype, where the image holds it as numbers of another one."""

    @property
    def dtype(self) -> str:
        """Its dtype as the program knows it."""
        return self.logical or self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as the program knows it: complex numbers may stand there as pairs of real ones."""
        is_pairs = self.logical is not None and self.logical.startswith("complex")
        return self.spec.shape[:-1] if is_pairs else self.spec.shape

    @property
    def key(self) -> tuple[str, str]:
        """The same for tensors that share their memory."""
        return self.image.kind, self.stored


class RankImages:
    """All tensors of one rank's part of a snapshot."""

    def __init__(self, meta: CaptureMeta, images: tuple[Image, ...]) -> None:
        self.meta = meta
        self.images = images
        self._aliases = {name: kept for image in images for name, kept in image.manifest.meta.aliases.items()}

    @property
    def state(self) -> Any:
        """The small state in its encoding."""
        return self.meta.state

    def find(self, name: str) -> Located:
        """The tensor that the state calls ``name``. Raises: ShardCorrupt, if there is none."""
        for candidate in (name, self._aliases.get(name)):
            for image in self.images:
                if candidate is not None and candidate in image.layout:
                    spec, offset = image.layout.find(candidate)
                    return Located(image, candidate, spec, offset, _logical(image, candidate))
        raise ShardCorrupt(f"{self.images[0].reader.where}: no tensor {name!r}, which the state refers to")

    def close(self) -> None:
        """Let go of the files; harmless twice."""
        for image in self.images:
            image.reader.close()


def _logical(image: Image, name: str) -> str | None:
    facts = image.manifest.meta.tensors.get(name)
    logical = facts.get("dtype") if isinstance(facts, dict) else None
    if logical is not None and not isinstance(logical, str):
        raise ShardCorrupt(f"{image.reader.where}: tensor {name!r}: bad dtype {logical!r:.50}")
    return logical


class SnapshotImages:
    """A snapshot opened to be looked at. While it is open, retention leaves it alone."""

    def __init__(self, store: SnapshotStore, plan: RestartPlan) -> None:
        """Blocks: reads manifests and headers. Raises: ShardCorrupt, FileNotFoundError, LevelUnavailable."""
        self.plan = plan
        self.ranks: list[RankImages] = []
        with contextlib.ExitStack() as stack:
            for offers in plan.sources:
                entry = offers[0]
                manifest = store.read_manifest(entry)
                images = [Image.open(SHARD, store.place(entry), manifest)]
                stack.callback(images[0].reader.close)
                if entry.frozen is not None:
                    frozen = plan.frozen[entry.frozen][0]
                    images.append(Image.open(FROZEN, store.place(frozen), store.read_manifest(frozen)))
                    stack.callback(images[1].reader.close)
                self.ranks.append(RankImages(manifest.meta, tuple(images)))
            self._stack = stack.pop_all()

    @property
    def only(self) -> RankImages:
        """The one rank. Raises: ConfigError, if there are several."""
        if len(self.ranks) != 1:
            raise ConfigError(f"step {self.plan.step} has {len(self.ranks)} ranks; only snapshots of one are exported")
        return self.ranks[0]

    def close(self) -> None:
        """Let go of all files; harmless twice."""
        self._stack.close()

    def __enter__(self) -> "SnapshotImages":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
