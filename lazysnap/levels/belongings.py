"""What one of several writers has at a level, and what of it goes: it looks at nothing that belongs to another.

Which snapshots are complete it is told (``engine.tally``), so what it does per snapshot does not grow with the number
of ranks, and a disk that only its own node sees is kept like one that all see.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lazysnap.config import PersistentLevel
from lazysnap.errors import FormatError, LevelError, ShardCorrupt
from lazysnap.levels.names import names_in
from lazysnap.levels.retention import Share, delete_unreferenced
from lazysnap.levels.shards import ShardPlace, entries_of
from lazysnap.policy import expired, is_wanted, kept
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import KEEP_PREFIX, Manifest, parse_directory_name, parse_frozen_directory_name
from lazysnap.shard.stem import parse_file_name

if TYPE_CHECKING:
    from lazysnap.levels.store import SnapshotStore

logger = logging.getLogger(__name__)

_IMAGE_LOOKS = 6
"""How often is looked for images of immutable tensors that nobody wants any more, ever more rarely: others may still
delete what refers to them."""

Beat = Callable[[], None]


@dataclass(frozen=True)
class Told:
    """What is known of the snapshots of one start of a training, whose ranks count together which of them all have."""

    run_id: str
    generation: str
    complete: tuple[int, ...] = ()
    """The newest ``keep_last`` steps that every rank has, read back whole."""
    void: frozenset[int] = frozenset()
    """Steps that this writer has, and that will never be complete: its part in them was taken back."""
    earlier: tuple[tuple[str, int], ...] = ()
    """Generation and step of what was complete before this start, up to where it goes on from, oldest first."""

    def floor(self, keep_last: int) -> int:
        """The oldest step of the newest ``keep_last``, whichever start they are of; -1 if there are fewer, or none of
        this one: of those before it nobody knows here that they were read back.
        """
        newest = sorted([*(step for _, step in self.earlier), *self.complete])[-keep_last:]
        return newest[0] if self.complete and len(newest) == keep_last else -1

    def is_of(self, other: "Told") -> bool:
        """Whether both are of the same start of the same run."""
        return (self.run_id, self.generation) == (other.run_id, other.generation)


@dataclass(frozen=True)
class _File:
    """One committed shard, of this writer or of one that is no more."""

    place: ShardPlace
    run_id: str
    generation: str
    step: int
    frozen: frozenset[str]

    @classmethod
    def of(cls, place: ShardPlace, manifest: Manifest) -> "_File":
        members = manifest.members or (manifest.meta,)
        frozen = frozenset(meta.frozen.digest for meta in members if meta.frozen is not None)
        meta = manifest.meta
        return cls(place, meta.run_id, meta.generation or "", meta.step, frozen)


class Belongings:
    """The files of one share at one level. Every method blocks. Raises: LevelError."""

    def __init__(self, store: "SnapshotStore", level: PersistentLevel, share: Share) -> None:
        self._store = store
        self._level = level
        self._share = share
        self._files: dict[str, _File] | None = None
        """By path of the manifest; ``None``: not looked yet."""
        self._written: dict[str, _File] = {}
        self._looks_left = 0
        self._passes = 0
        self._unreferenced: frozenset[str] = frozenset()
        """Where images lie that nothing referred to at the last look."""
        self._named_for: Told | None = None
        self._named: set[int] = set()
        """Surplus that the owner heard of."""

    def confirm(self, entry: Entry, manifest: Manifest, beat: Beat) -> None:
        """Read back what was just committed, and what it refers to. Raises: ShardCorrupt, and it is no snapshot now."""
        store, place = self._store, self._store.place(entry)
        self._add(_File.of(place, manifest))
        if not (not store.storage.checks_writes if self._level.verify is None else self._level.verify):
            return
        try:
            for one in entries_of(manifest, store.url, store.speed, entry.location):
                store.check_frozen(one, beat)
        except (FormatError, FileNotFoundError) as error:
            raise self._damaged(entry, error) from error  # images may be written again, for a later snapshot
        try:
            store.verify_entry(entry, beat)
        except (FormatError, FileNotFoundError) as error:
            place.withdraw()
            self._drop(place)
            # Its bytes as well: a place where all is read back damaged would fill up. If that fails, the next sweep.
            if not store.storage.is_leased(place.shard_path):
                place.delete_or_leave()
            raise self._damaged(entry, error) from error

    def _damaged(self, entry: Entry, error: Exception) -> ShardCorrupt:
        where = f"{self._store.url}: step {entry.step} does not count"
        return ShardCorrupt(f"{where}, and nothing is deleted for it: it was read back damaged: {error}")

    def _add(self, file: _File) -> None:
        (self._written if self._files is None else self._files)[file.place.manifest_path] = file

    def _drop(self, place: ShardPlace) -> None:
        self._written.pop(place.manifest_path, None)
        self._store.forget(place)
        if self._files is not None:
            self._files.pop(place.manifest_path, None)

    # ---------------------------------------------------------------- what is there

    def _held(self, beat: Beat) -> dict[str, _File]:
        """All files; looked for once, when the first of them may go: later ones are written here."""
        if self._files is None:
            self._files = {file.place.manifest_path: file for file in self._look(beat)} | self._written
        return self._files

    def _look(self, beat: Beat) -> Iterator[_File]:
        storage = self._store.storage
        for directory in storage.list():
            if parse_frozen_directory_name(directory) is not None:
                self._looks_left = _IMAGE_LOOKS
            if parse_directory_name(directory) is None:
                continue
            beat()
            for name in storage.list(directory):
                parsed = parse_file_name(name)
                if parsed is None or name != parsed[0].manifest or not self._share.has(parsed[0]):
                    continue
                beat()
                place = ShardPlace(storage, directory, parsed[0])
                try:
                    yield _File.of(place, place.read_manifest())
                except FileNotFoundError:
                    continue
                except (FormatError, LevelError) as error:
                    logger.info("%s stays: %s", place.where, error)

    # ---------------------------------------------------------------- what goes

    def tidy(self, told: Told, protect: frozenset[int], beat: Beat) -> list[int]:
        """Delete what need not stay; the steps that went. Steps in ``protect`` stay, named ones, and what is read now.

        With ``keep_last`` complete snapshots older ones go, also those of earlier starts and of ranks that are no more;
        and whatever its owner has taken back. Crash-safe: the manifest goes first.
        """
        if not told.void and told.floor(self._level.keep_last) < 0:
            return []  # not even looked
        files = self._held(beat)
        going = [file for file in self._over(told, files.values()) if file.step not in protect]
        gone, dropped = [], set[str]()
        for file in sorted(going, key=lambda file: (file.step, file.generation)):
            beat()
            if self._is_named(file) or self._store.storage.is_leased(file.place.shard_path):
                continue  # the next time
            file.place.delete()
            self._drop(file.place)
            gone.append(file.step)
            dropped |= file.frozen
        if dropped - {digest for file in files.values() for digest in file.frozen}:
            self._looks_left = _IMAGE_LOOKS
        self._clear_images(told)
        return gone

    def _over(self, told: Told, files: Iterable[_File]) -> Iterator[_File]:
        """What the rules of retention leave nothing of, but for names and readers."""
        of_run = [file for file in files if file.run_id == told.run_id]
        steps = sorted({file.step for file in of_run if file.generation == told.generation})
        old = {*expired(steps, self._level, sound=told.complete), *(told.void - set(told.complete))}
        complete = tuple(kept(steps, self._level, told.complete))
        floor = replace(told, complete=complete).floor(self._level.keep_last)
        for file in of_run:
            if file.generation == told.generation:
                if file.step in old:
                    yield file
            # Of an earlier start, and passed: nobody counts any more how much of it is there.
            elif file.generation < told.generation and floor >= 0 and file.step <= complete[-1]:
                is_kept = file.step >= floor and (file.generation, file.step) in told.earlier
                if not is_kept and not is_wanted(self._level, file.step):
                    yield file

    def _is_named(self, file: _File) -> bool:
        directory, problems = file.place.directory, list[str]()
        names = self._store.storage.list(directory, KEEP_PREFIX)
        given = names_in(self._store.storage, directory, names, problems)
        return bool(problems) or any(run_id in (None, file.run_id) for _, run_id in given)

    def surplus(self, told: Told, protect: frozenset[int], ahead: int, beat: Beat) -> list[int]:
        """Steps that are not known to be complete, and more than there may be: their owner should take them back.

        ``ahead``: persisted steps that others may be behind. Where one of them fails for longer, what the others wrote
        meanwhile is complete nowhere. Each is named once for what is ``told``: until the owner says more it cannot act.
        """
        if told is not self._named_for:
            self._named_for, self._named = told, set()
        files = self._written if self._files is None else self._files
        of_start = (told.run_id, told.generation)
        mine = {one.step: one for one in files.values() if (one.run_id, one.generation) == of_start}
        newest = kept(sorted(mine), self._level, told.complete)
        oldest = newest[0] if len(newest) == self._level.keep_last else -1  # what is older goes in any case
        waiting = sorted(step for step in mine if step > oldest and step not in told.complete)
        passed = told.void | protect | self._named
        found = []
        for step in waiting[: -(self._level.keep_last + ahead)]:
            if step not in passed:
                beat()
                if not self._is_named(mine[step]):
                    found.append(step)
        self._named.update(found)
        return found

    def _clear_images(self, told: Told) -> None:
        """Images that nothing refers to any more. One of each node looks at all manifests, and only after something
        went that referred to others than are referred to now: some times, ever more rarely.

        What one look finds goes at the next: between the listing of the manifests and that of the images others may
        have committed an image, and what refers to it.
        """
        if self._share.node is None or not self._looks_left or len(told.complete) < self._level.keep_last:
            return
        self._passes += 1
        if self._passes < 2 ** (_IMAGE_LOOKS - self._looks_left):
            return
        self._passes, self._looks_left = 0, self._looks_left - 1
        inventory = self._store.inventory()
        wanted = {entry.frozen for entry in inventory.entries if entry.run_id == told.run_id}
        self._unreferenced = delete_unreferenced(
            self._store.storage, inventory, told.run_id, wanted, self._unreferenced
        )
        if self._unreferenced:
            self._looks_left = max(self._looks_left, 1)
