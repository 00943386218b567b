"""Snapshots at one level: shard first, manifest last; the manifest is the commit, and the first thing to go.

Layout (docs/format.md)::

    step-00001000-<run>-<start>/rank-00000-of-00001.safetensors
    step-00001000-<run>-<start>/rank-00000-of-00001.json
    step-00001000-<run>-<start>/keep-before-anneal
    frozen-<digest>/rank-00000-of-00001.safetensors     frozen tensors, once for all snapshots at the level
    frozen-<digest>/rank-00000-of-00001.json

The name of a directory says what is in it, so no two writers ever want the same name for different bytes.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from lazysnap import faults
from lazysnap.config import PersistentLevel, resolve_url
from lazysnap.errors import (
    ConfigError,
    FormatError,
    LazySnapError,
    LevelError,
    LevelUnavailable,
    ShardCorrupt,
)
from lazysnap.levels.blocks import read_shard
from lazysnap.levels.listing import Listing, list_names
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.names import is_given_by_a_run
from lazysnap.levels.retention import Share, retain, sweep
from lazysnap.levels.shards import (
    FROZEN_NAME,
    ShardPlace,
    check_place,
    entry_of,
    place_of,
    read_committed,
    write_shard,
)
from lazysnap.levels.source import BlockSource
from lazysnap.levels.storage import Storage, level_error
from lazysnap.resolver import Entry, FrozenEntry, Inventory
from lazysnap.shard.manifest import CaptureMeta, Manifest
from lazysnap.shard.names import (
    ShardName,
    SnapshotName,
    frozen_directory_name,
    is_keep_name,
    keep_file_name,
    parse_file_name,
    parse_frozen_directory_name,
)

logger = logging.getLogger(__name__)


def open_store(url: str, *, speed: int = 1, options: Mapping[str, Any] | None = None) -> "SnapshotStore":
    """The store at a path or fsspec URL. Does no I/O for local paths.

    Raises: LevelUnavailable, if fsspec does not know the protocol or lacks its package.
    """
    url = resolve_url(url)
    if urlsplit(url).scheme in ("", "file", "local"):
        return SnapshotStore(LocalStorage(url), speed=speed)
    # fsspec costs 0.1 s that local levels need not pay.
    if urlsplit(url).scheme in ("s3", "s3a"):
        try:
            from lazysnap.levels.s3 import S3Storage
        except ImportError as error:
            raise LevelUnavailable(f"{url}: needs botocore: pip install 'lazysnap[s3]'") from error
        return SnapshotStore(S3Storage(url, options), speed=speed)
    from lazysnap.levels.fsspec_storage import FsspecStorage

    return SnapshotStore(FsspecStorage(url, options), speed=speed)


class SnapshotStore:
    """All snapshots at one level. Thread-safe for different steps. Every method blocks.

    Raises: LevelError, if the level does not answer or refuses.
    """

    def __init__(self, storage: Storage, *, speed: int = 1) -> None:
        self.storage = storage
        self.url = storage.url
        self.speed = speed
        # By path of the manifest: its stamp when it was read, size of the shard, what it holds.
        self._known: dict[str, tuple[object, int, Entry]] = {}
        # By path of the manifest: ``created_ns`` and stamp of the snapshot that was read back whole.
        self._sound: dict[str, tuple[int, object]] = {}
        self._frozen_read: set[str] = set()
        """Digests of frozen tensors that this store read back whole."""

    # ---------------------------------------------------------------- writing

    def write(self, meta: CaptureMeta, source: BlockSource) -> Manifest:
        """Write and commit one shard while its later bytes may still be on their way; see ``write_entry``."""
        return self.write_entry(meta, source)[1]

    def write_entry(
        self,
        meta: CaptureMeta,
        source: BlockSource,
        *,
        expected: str | None = None,
        beat: Callable[[], None] | None = None,
    ) -> tuple[Entry, Manifest]:
        """Write and commit one shard; where it is now, and its manifest.

        Durable: on return, shard and manifest survive a power cut. What is committed already is not written again.
        Raises: LevelError, and nothing of the shard is left or visible; CaptureAborted likewise; ShardCorrupt, if what
        was read has not the ``expected`` digest (``Checksums.whole``).
        """
        place = ShardPlace(self.storage, meta.name.directory, ShardName(meta.rank, meta.world_size))
        with self._naming(f"writing step {meta.step}"):
            manifest = self._committed(place, meta, beat)
            if manifest is None:
                manifest = write_shard(place, meta, source, expected=expected, beat=beat)
                if self.storage.checks_writes:
                    self._sound[place.manifest_path] = manifest.created_ns, None
        # Nothing after the commit may fail the snapshot.
        faults.point("level.store.committed")
        return entry_of(meta, self.url, self.speed, place.directory), manifest

    def _committed(self, place: ShardPlace, meta: CaptureMeta, beat: Callable[[], None] | None) -> Manifest | None:
        """The manifest, if this very capture is there and reads back whole: a keeper before this one may have done it.

        A damaged one is written again.
        """
        try:
            if place.read_manifest().meta != meta:
                return None
            return self.verify_entry(entry_of(meta, self.url, self.speed, place.directory), beat)
        except (FormatError, FileNotFoundError):
            return None

    def write_frozen(
        self, meta: CaptureMeta, source: BlockSource, digest: str, beat: Callable[[], None] | None = None
    ) -> Manifest:
        """Write and commit frozen tensors, unless they are there already.

        Blocks; ``beat`` is called meanwhile. Raises: ShardCorrupt, if what was read has not that digest; LevelError;
        CaptureAborted.
        """
        place = ShardPlace(self.storage, frozen_directory_name(digest), FROZEN_NAME)
        with self._naming(f"writing the frozen tensors {digest}"):
            if self.has_frozen(digest, beat):
                return place.read_manifest()
            manifest = write_shard(place, meta, source, expected=digest, beat=beat)
        if self.storage.checks_writes:
            self._frozen_read.add(digest)
        return manifest

    def has_frozen(self, digest: str, beat: Callable[[], None] | None = None) -> bool:
        """Whether frozen tensors are committed and whole. Blocks: reads them back, later only their manifest."""
        place = ShardPlace(self.storage, frozen_directory_name(digest), FROZEN_NAME)
        try:
            manifest = read_committed(place)
            if digest not in self._frozen_read:
                read_shard(place, manifest, beat=lambda count: beat() if beat else None)
        except (FormatError, FileNotFoundError):
            self._frozen_read.discard(digest)
            return False
        self._frozen_read.add(digest)
        return True

    def check_frozen(self, entry: Entry, beat: Callable[[], None] | None = None) -> None:
        """See that what a snapshot has of frozen tensors is there. Blocks: as ``has_frozen``. Raises: ShardCorrupt."""
        if entry.frozen is not None and not self.has_frozen(entry.frozen, beat):
            raise ShardCorrupt(f"{self.url}: the frozen tensors {entry.frozen} are lost or damaged")

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except LazySnapError:
            raise
        except OSError as error:
            raise level_error(self.url, what, error) from error

    # ---------------------------------------------------------------- looking

    def listing(self, *, marked: bool = False) -> Listing:
        """What is here by its name alone; see ``levels.listing``. Raises: LevelUnavailable."""
        return list_names(self.storage, marked=marked)

    def inventory(self, listing: Listing | None = None, share: tuple[int, int] | None = None) -> Inventory:
        """What can be restored from here, and what cannot and why. Nothing found there makes it raise.

        With a ``listing`` nothing is listed again, with ``share`` (number, of how many) only that part is looked at.
        Raises: LevelUnavailable, if the level does not answer.
        """
        listing = self.listing() if listing is None else listing
        entries: list[Entry] = []
        images: list[FrozenEntry] = []
        problems = list(listing.problems)
        seen: set[str] = set()
        for directory in listing.directories:
            frozen = parse_frozen_directory_name(directory.name)
            named = SnapshotName.parse(directory.name)
            passed_over = "" if named is None else f"step {named.step} passed over: "
            for name in directory.manifests(share):
                seen.add(f"{directory.name}/{name}")
                parsed = parse_file_name(name)
                assert parsed is not None
                try:
                    found = self._look_at(directory.name, parsed[0])
                except FileNotFoundError as error:
                    lost = error.filename or error
                    problems.append(f"{passed_over}{self.url}/{directory.name}: a manifest without its shard: {lost}")
                except (FormatError, LevelError) as error:
                    # One file that cannot be read says nothing about the others.
                    problems.append(f"{passed_over}{error}")
                else:
                    if frozen is None:
                        entries.append(replace(found, names=directory.names))
                    else:
                        images.append(FrozenEntry(self.url, self.speed, frozen, directory.name))
        if share is None:
            for known in (self._known, self._sound):
                for path in known.keys() - seen:
                    known.pop(path, None)  # a run may write millions
        return Inventory(self.url, tuple(entries), tuple(images), tuple(problems))

    def _look_at(self, directory: str, stem: ShardName) -> Entry:
        """Check one manifest, and that its shard is there. Manifests that did not change are not read again.

        Raises: FormatError, LevelError, FileNotFoundError.
        """
        path = f"{directory}/{stem.manifest}"
        stamp = self.storage.stamp(path)
        known = self._known.get(path)
        if known is None or stamp is None or known[0] != stamp:
            manifest = Manifest.decode(self.storage.get(path), f"{self.url}/{path}")
            check_place(manifest, ShardPlace(self.storage, directory, stem))
            entry = entry_of(manifest.meta, self.url, self.speed, directory)
            known = self._known[path] = (stamp, manifest.size_bytes, entry)
        _, expected, entry = known
        shard = f"{directory}/{stem.shard}"
        size = self.storage.size(shard)
        if size != expected:
            raise ShardCorrupt(f"{self.url}/{shard}: {size} bytes, the manifest says {expected}")
        return entry

    # ---------------------------------------------------------------- reading

    def place(self, entry: Entry | FrozenEntry) -> ShardPlace:
        """Where the files of an entry are."""
        return place_of(self.storage, entry)

    def read_manifest(self, entry: Entry | FrozenEntry) -> Manifest:
        """What is written beside a shard or an image.

        Raises: ShardCorrupt, FileNotFoundError, LevelUnavailable.
        """
        manifest = self.place(entry).read_manifest()
        if isinstance(entry, FrozenEntry) and manifest.checksums.whole != entry.digest:
            raise ShardCorrupt(f"{self.url}/{entry.location}: holds {manifest.checksums.whole}")
        return manifest

    def read_image(
        self,
        entry: Entry | FrozenEntry,
        manifest: Manifest,
        out: memoryview,
        beat: Callable[[], None] | None = None,
    ) -> None:
        """Read a shard or a file of frozen tensors into ``out`` (``manifest.size_bytes`` long).

        Every block is verified as it arrives, and ``beat`` called. While it is read, retention leaves it alone.
        Raises: ShardCorrupt, naming file and block; FileNotFoundError; LevelUnavailable. ``out`` is garbage then.
        """
        if len(out) != manifest.size_bytes:
            raise ShardCorrupt(f"{self.url}/{entry.location}: {manifest.size_bytes} bytes into {len(out)}")
        read_shard(self.place(entry), manifest, out=out, beat=lambda count: beat() if beat else None)

    def verify_entry(self, entry: Entry | FrozenEntry, beat: Callable[[], None] | None = None) -> Manifest:
        """Read every byte of a shard and compare; its manifest. Raises: as ``read_image``."""
        place = self.place(entry)
        manifest = place.read_manifest()
        read_shard(place, manifest, beat=lambda count: beat() if beat else None)
        self._sound[place.manifest_path] = manifest.created_ns, None
        return manifest

    def forget(self, place: ShardPlace) -> None:
        """It was deleted."""
        self._sound.pop(place.manifest_path, None)

    def is_sound(self, entry: Entry) -> bool:
        """Whether this store read the snapshot back, or the place checked every part, since it was committed."""
        path = self.place(entry).manifest_path
        created_ns, seen = self._sound.get(path, (None, None))
        # What the last inventory saw: a manifest with the same stamp need not be read again each time.
        stamp = self._known[path][0] if path in self._known else None
        if stamp is not None and stamp == seen:
            return True
        if created_ns is None or self.read_manifest(entry).created_ns != created_ns:
            return False
        self._sound[path] = created_ns, stamp
        return True

    # ---------------------------------------------------------------- keeping and deleting

    def keep(self, entry: Entry, name: str) -> None:
        """Give a snapshot a name: retention leaves it alone until ``release``. Raises: ConfigError, for a bad name."""
        if not is_keep_name(name):
            raise ConfigError(
                f"a snapshot's name must be 1 to 64 letters, digits, points, dashes or underscores, got {name!r:.100}"
            )
        file = keep_file_name(name)
        with self._naming(f"naming step {entry.step} {name!r}"):
            if file in self.storage.list(entry.location, file) and not self._is_our_name(entry.location, file):
                raise ConfigError(f"{self.url}/{entry.location}/{file}: a file of somebody else; take another name")
            self.storage.put(f"{entry.location}/{file}", entry.run_id.encode())

    def release(self, run_id: str | None, name: str) -> list[str]:
        """Take a name from the snapshots of a run (``None``: of all runs); the directories that had it."""
        freed, file = [], keep_file_name(name)
        for entry in self.inventory().entries:
            if name in entry.names and run_id in (None, entry.run_id) and entry.location not in freed:
                if self._is_our_name(entry.location, file):
                    self.storage.delete(f"{entry.location}/{file}")
                    freed.append(entry.location)
                else:
                    logger.warning("%s/%s/%s: not deleted, no run wrote it", self.url, entry.location, file)
        return freed

    def _is_our_name(self, directory: str, file: str) -> bool:
        """Whether a ``keep-…`` object is one that a run gave, which can be told by its content."""
        path = f"{directory}/{file}"
        return is_given_by_a_run(self.storage, path) and not self.storage.is_link(path)

    def retain(
        self,
        level: PersistentLevel,
        run_id: str,
        protect: frozenset[int] = frozenset(),
        beat: Callable[[], None] | None = None,
    ) -> list[int]:
        """Delete what ``level`` need not keep of this run's complete snapshots; the steps that went.

        For the only writer of a run; of several each has its ``levels.belongings``.
        Counts only snapshots that are complete and were read back whole. Steps in ``protect`` stay (another level has
        still to copy them), and so does what has a name or is being read by a restore.
        Crash-safe: the manifest goes first, so that a half-deleted snapshot is garbage, not a snapshot.
        Raises: ShardCorrupt, if the newest one was read back damaged; nothing is deleted on its account.
        """
        with self._naming("deleting old snapshots"):
            return retain(self, level, run_id, protect, beat or (lambda: None))

    def sweep(self, share: Share | None = None) -> list[str]:
        """Remove what dead writers left of a share's files (``None``: of all): temporary ones, uncommitted shards.

        Also what falls to it of ranks that are no more. What a living writer works on stays, whoever it is.
        What went is returned.
        """
        with self._naming("sweeping"):
            return sweep(self.storage, share)
