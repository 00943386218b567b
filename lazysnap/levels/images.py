"""Images of immutable tensors at a level: whether one that is committed is whole.

An image is read back when a process first refers to it there, and again when the stamp of one of its files is another;
between the two a look at the stamps is all that a snapshot costs.
"""

from collections.abc import Callable
from enum import Enum, auto

from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.levels.blocks import read_shard
from lazysnap.levels.shards import ShardPlace
from lazysnap.shard.checksum import digest as digest_of
from lazysnap.shard.manifest import Manifest

Beat = Callable[[], None] | None


class Purpose(Enum):
    """Who wants to know. Retention does not rely on what was seen before the first snapshot referred to the image."""

    WRITING = auto()
    DELETING = auto()


class Images:
    """What this process knows of the images at one level. A damaged one is no image to whoever asks here."""

    def __init__(self) -> None:
        # By directory: stamps of both files when they were read or written, and what was wrong; empty if nothing.
        self._seen: dict[tuple[str, Purpose], tuple[object, str]] = {}

    def problem(self, place: ShardPlace, digest: str, beat: Beat, purpose: Purpose = Purpose.WRITING) -> str:
        """What is wrong with a committed image, empty if it is whole. Blocks: reads it back, if that was not done.

        Raises: FileNotFoundError, if none is committed; LevelError.
        """
        stamps = _stamps(place)
        known = self._seen.get((place.directory, purpose))
        if known is not None and known[0] == stamps:
            return known[1]
        text = ""
        try:
            read_shard(place, _checked(place, digest), beat=lambda count: beat() if beat else None)
        except (FormatError, FileNotFoundError) as error:
            text = str(error) if isinstance(error, FormatError) else f"{place.where}: is gone"
        for one in Purpose if text else (purpose,):
            self._seen[place.directory, one] = stamps, text
        return text

    def is_whole(self, place: ShardPlace, digest: str, beat: Beat) -> bool:
        """Whether it is committed, and whole. Blocks: as ``problem``."""
        try:
            return not self.problem(place, digest, beat)
        except FileNotFoundError:
            return False

    def check(self, place: ShardPlace, digest: str, beat: Beat) -> None:
        """For retention. Raises: ShardCorrupt, if it is damaged; otherwise as ``problem``."""
        if text := self.problem(place, digest, beat, Purpose.DELETING):
            raise ShardCorrupt(text)

    def written(self, place: ShardPlace) -> None:
        """This process has just written it."""
        self._seen[place.directory, Purpose.WRITING] = _stamps(place), ""


def _stamps(place: ShardPlace) -> object:
    """Differs if one of the files does. Raises: FileNotFoundError, if there is no manifest; LevelError."""
    storage = place.storage
    manifest = storage.stamp(place.manifest_path) or digest_of(storage.get(place.manifest_path))
    try:
        return manifest, storage.stamp(place.shard_path) or storage.size(place.shard_path)
    except FileNotFoundError:
        return manifest, None


def _checked(place: ShardPlace, digest: str) -> Manifest:
    manifest = place.read_manifest()
    if manifest.checksums.whole != digest:
        raise ShardCorrupt(f"{place.where}: holds {manifest.checksums.whole}, its name says {digest}")
    return manifest
