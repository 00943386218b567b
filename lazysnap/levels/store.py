"""Snapshots at one level: shard first, manifest last; the manifest is the commit, and the first thing to go.

Layout (docs/format.md)::

    step-00001000/rank-00000-of-00001.safetensors
    step-00001000/rank-00000-of-00001.json
    step-00001000/keep-before-anneal
    frozen-<run id>-<digest>/rank-00000-of-00001.safetensors   immutable tensors, once for all snapshots of the run
    frozen-<run id>-<digest>/rank-00000-of-00001.json
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
    NameTaken,
    ShardCorrupt,
)
from lazysnap.levels.images import Images
from lazysnap.levels.listing import Listing, list_names
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.once import write_once
from lazysnap.levels.retention import Share, retain, sweep
from lazysnap.levels.shards import (
    FROZEN_STEM,
    NodeCapture,
    ShardPlace,
    check_place,
    entries_of,
    entry_of,
    place_of,
    read_blocks,
    write_shard,
)
from lazysnap.levels.source import BlockSource
from lazysnap.levels.storage import Storage, level_error
from lazysnap.resolver import Entry, FrozenEntry, Inventory
from lazysnap.shard.manifest import (
    CaptureMeta,
    Manifest,
    directory_names,
    frozen_directory_name,
    is_keep_name,
    keep_file_name,
    parse_frozen_directory_name,
    parse_keep_file_name,
)
from lazysnap.shard.stem import Stem, parse_file_name

logger = logging.getLogger(__name__)

_NAME_ATTEMPTS, _USUAL_NAMES = 5, 3


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
            raise LevelUnavailable(f"{url}: needs s3fs: pip install 'lazysnap[s3]'") from error
        return SnapshotStore(S3Storage(url, options), speed=speed)
    from lazysnap.levels.remote import FsspecStorage

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
        self._known: dict[str, tuple[object, int, tuple[Entry, ...]]] = {}
        # By path of the manifest: ``created_ns`` and stamp of the snapshot that was read back whole.
        self._sound: dict[str, tuple[int, object]] = {}
        self._images = Images()

    # ---------------------------------------------------------------- writing

    def write(self, meta: CaptureMeta, source: BlockSource) -> Manifest:
        """Write and commit one shard while its later bytes may still be on their way; see ``write_entry``."""
        return self.write_entry(meta, source)[1]

    def write_entry(
        self,
        meta: CaptureMeta | NodeCapture,
        source: BlockSource,
        *,
        expected: str | None = None,
        beat: Callable[[], None] | None = None,
    ) -> tuple[Entry, Manifest]:
        """Write and commit one shard; where it is now (of a node's: its first member), and its manifest.

        Durable: on return, shard and manifest survive a power cut. A committed shard is never written over, also not by
        another writer at the same moment: another name is used, and an older one of the same run goes after the commit
        (with several ranks: by ``retain``), if the new one is read back whole (``beat`` is called for its blocks).
        Raises: LevelError, and nothing of the shard is left or visible; CaptureAborted likewise; ShardCorrupt, if what
        was read has not the ``expected`` digest (``Checksums.whole``).
        """
        taken: set[str] = set()
        whole = (
            meta if isinstance(meta, NodeCapture) else NodeCapture(Stem.of_rank(meta.rank, meta.world_size), (meta,))
        )
        meta = whole.members[0]
        for _ in range(_NAME_ATTEMPTS):
            with self._naming(f"writing step {meta.step}"):
                directory, previous = self._directory_for(meta, whole.stem, taken)
                place = ShardPlace(self.storage, directory, whole.stem)
                try:
                    manifest = write_shard(place, whole.members, source, expected=expected, beat=beat)
                except NameTaken:
                    taken.add(directory)
                    continue
                if self.storage.checks_writes:
                    self._sound[place.manifest_path] = manifest.created_ns, None
                # Nothing after the commit may fail the snapshot.
                faults.point("level.store.committed")
                entry = entry_of(meta, self.url, self.speed, (directory, whole.stem))
                if previous and meta.world_size == 1:
                    # Of several ranks, others still need the older one: retention sees when all have the newer.
                    self._replace(previous, entry, beat)
                return entry, manifest
        raise LevelUnavailable(f"{self.url}: step {meta.step}: other writers took every name; does the job run twice?")

    def _replace(self, previous: list[str], entry: Entry, beat: Callable[[], None] | None) -> None:
        """Delete older copies of a shard now that there is a newer one, if that is whole and nobody reads them."""
        try:
            if not self.storage.checks_writes:
                self.verify_entry(entry, beat)
                self.check_frozen(entry, beat)
            for old in previous:
                place = ShardPlace(self.storage, old, Stem.of_rank(entry.rank, entry.world_size))
                if not self.storage.is_leased(place.shard_path):
                    place.delete_or_leave()
        except (LazySnapError, OSError) as error:
            logger.warning("%s: older copies of step %d stay: %s", self.url, entry.step, error)

    def write_frozen(
        self, meta: CaptureMeta, source: BlockSource, digest: str, beat: Callable[[], None] | None = None
    ) -> Manifest:
        """Write and commit the image of a run's immutable tensors, unless it is there already; a damaged one goes.

        Where another rank is writing the same one, its end is waited for. Blocks: at most some minutes; ``beat`` is
        called meanwhile. Raises: ShardCorrupt, if what was read has not that digest; LevelError; CaptureAborted.
        """
        place = ShardPlace(self.storage, frozen_directory_name(meta.run_id, digest), FROZEN_STEM)

        def write() -> Manifest:
            manifest = write_shard(place, (meta,), source, expected=digest)  # never taken back: others may refer to it
            self._images.written(place)
            return manifest

        with self._naming(f"writing the immutable tensors {digest}"):
            return write_once(place, lambda: self._images.make_room(place, digest, beat), write, beat)

    def has_frozen(self, run_id: str, digest: str, beat: Callable[[], None] | None = None) -> bool:
        """Whether the image of a run's immutable tensors is committed and whole. Blocks: the first time reads it."""
        place = ShardPlace(self.storage, frozen_directory_name(run_id, digest), FROZEN_STEM)
        return self._images.is_whole(place, digest, beat)

    def check_frozen(self, entry: Entry, beat: Callable[[], None] | None = None) -> None:
        """Read back the immutable tensors of a snapshot, if any, once. Raises: ShardCorrupt, FileNotFoundError."""
        if entry.frozen is not None:
            place = ShardPlace(self.storage, frozen_directory_name(entry.run_id, entry.frozen), FROZEN_STEM)
            self._images.check(place, entry.frozen, beat)

    def frozen_lease(self, run_id: str, digest: str) -> contextlib.AbstractContextManager[None]:
        """While held, no retention takes the image for unreferenced: between its commit and that of a snapshot."""
        return self.storage.lease(f"{frozen_directory_name(run_id, digest)}/{FROZEN_STEM.manifest}")

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except LazySnapError:
            raise
        except OSError as error:
            raise level_error(self.url, what, error) from error

    def _directory_for(self, meta: CaptureMeta, stem: Stem, taken: set[str]) -> tuple[str, list[str]]:
        """Where to write, and where this shard of the run stands already: a resumed run passes a step again."""
        free, previous = None, []
        for number, name in enumerate(directory_names(meta)):
            owner = self._run_of(f"{name}/{stem.manifest}")
            # A snapshot that was given a name stays until it is taken from it.
            if owner == meta.run_id and not any(map(parse_keep_file_name, self.storage.list(name))):
                previous.append(name)
            if owner is None and free is None and name not in taken:
                free = name
            if free is not None and number >= _USUAL_NAMES - 1:
                return free, previous
        raise AssertionError("there are names without end")

    def _run_of(self, path: str) -> str | None:
        """The run that committed a manifest, ``None`` if there is none, an empty string if it cannot be read."""
        try:
            return Manifest.decode(self.storage.get(path), f"{self.url}/{path}").meta.run_id
        except FileNotFoundError:
            return None
        except FormatError:
            return ""

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
            for name in directory.manifests(share):
                seen.add(f"{directory.name}/{name}")
                parsed = parse_file_name(name)
                if parsed is None or name != parsed[0].manifest:
                    problems.append(f"{self.url}/{directory.name}/{name}: not a manifest's name")
                    continue
                try:
                    found = self._look_at(directory.name, parsed[0])
                except FileNotFoundError as error:
                    lost = error.filename or error
                    problems.append(f"{self.url}/{directory.name}: a manifest without its shard: {lost}")
                except (FormatError, LevelError) as error:
                    # One file that cannot be read says nothing about the others.
                    problems.append(str(error))
                else:
                    if frozen is None:
                        mine = tuple(name for name, run_id in directory.given if run_id in (None, found[0].run_id))
                        entries += [replace(entry, names=mine) for entry in found]
                    else:
                        images.append(FrozenEntry(self.url, self.speed, *frozen, directory.name))
        if share is None:
            for known in (self._known, self._sound):
                for path in known.keys() - seen:
                    known.pop(path, None)  # a run may write millions
        return Inventory(self.url, tuple(entries), tuple(images), tuple(problems))

    def _look_at(self, directory: str, stem: Stem) -> tuple[Entry, ...]:
        """Check one manifest, and that its shard is there. Manifests that did not change are not read again.

        Raises: FormatError, LevelError, FileNotFoundError.
        """
        path = f"{directory}/{stem.manifest}"
        stamp = self.storage.stamp(path)
        known = self._known.get(path)
        if known is None or stamp is None or known[0] != stamp:
            manifest = Manifest.decode(self.storage.get(path), f"{self.url}/{path}")
            check_place(manifest, ShardPlace(self.storage, directory, stem))
            entries = entries_of(manifest, self.url, self.speed, directory)
            known = self._known[path] = (stamp, manifest.size_bytes, entries)
        _, expected, entries = known
        shard = f"{directory}/{stem.shard}"
        size = self.storage.size(shard)
        if size != expected:
            raise ShardCorrupt(f"{self.url}/{shard}: {size} bytes, the manifest says {expected}")
        return entries

    # ---------------------------------------------------------------- reading

    def place(self, entry: Entry | FrozenEntry) -> ShardPlace:
        """Where the files of an entry are."""
        return place_of(self.storage, entry)

    def read_manifest(self, entry: Entry | FrozenEntry) -> Manifest:
        """What is written beside a shard or an image, as the entry's rank sees it.

        Raises: ShardCorrupt, FileNotFoundError, LevelUnavailable.
        """
        manifest = self.place(entry).read_manifest()
        if isinstance(entry, Entry) and entry.file is not None:
            return manifest.of(entry.rank, f"{self.url}/{entry.location}/{entry.file}")
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
        """Read a shard or an image of immutable tensors into ``out`` (``manifest.size_bytes`` long).

        Every block is verified as it arrives, and ``beat`` called. While it is read, retention leaves it alone.
        Raises: ShardCorrupt, naming file and block; FileNotFoundError; LevelUnavailable. ``out`` is garbage then.
        """
        if len(out) != manifest.size_bytes:
            raise ShardCorrupt(f"{self.url}/{entry.location}: {manifest.size_bytes} bytes into {len(out)}")
        read_blocks(self.place(entry), manifest, lambda offset, length: out[offset : offset + length], beat)

    def verify_entry(self, entry: Entry | FrozenEntry, beat: Callable[[], None] | None = None) -> Manifest:
        """Read every byte of a shard and compare; its manifest. Raises: as ``read_image``."""
        place = self.place(entry)
        manifest = place.read_manifest()
        read_blocks(place, manifest, lambda offset, length: map_anonymous(length), beat)
        head = map_anonymous(manifest.header_bytes)
        self.storage.read_into(place.shard_path, 0, head)
        manifest.check_header(head, place.where)
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
        with self._naming(f"naming step {entry.step} {name!r}"):
            self.storage.put(f"{entry.location}/{keep_file_name(name)}", entry.run_id.encode())

    def release(self, run_id: str | None, name: str) -> list[str]:
        """Take a name from the snapshots of a run (``None``: of all runs); the directories that had it."""
        freed = []
        for entry in self.inventory().entries:
            if name in entry.names and run_id in (None, entry.run_id) and entry.location not in freed:
                self.storage.delete(f"{entry.location}/{keep_file_name(name)}")
                freed.append(entry.location)
        return freed

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
