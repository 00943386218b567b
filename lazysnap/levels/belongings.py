"""What one of several writers has at a level, and what of it goes: it looks at nothing that belongs to another.

Which snapshots are complete it is told (``engine.tally``), so what it does per snapshot does not grow with the number
of ranks, and a disk that only its own node sees is kept like one that all see.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lazysnap.config import PersistentLevel
from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.levels.retention import Share
from lazysnap.levels.shards import ShardPlace
from lazysnap.policy import expired, is_wanted, kept, meeting_points
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import Manifest
from lazysnap.shard.names import SnapshotName, keep_file_name, parse_file_name, parse_keep_file_name

if TYPE_CHECKING:
    from lazysnap.levels.store import SnapshotStore

Beat = Callable[[], None]


@dataclass(frozen=True)
class Told:
    """What is known of the snapshots of one start of a training, whose ranks count together which of them all have."""

    run_id: str
    start: str
    complete: tuple[int, ...] = ()
    """The newest ``keep_last`` steps that every rank has, read back whole."""
    void: frozenset[int] = frozenset()
    """Steps that this writer has, and that will never be complete: its part in them was taken back."""
    earlier: tuple[tuple[str, int], ...] = ()
    """Start and step of what was complete before this start, up to where it goes on from, oldest first."""

    def floor(self, keep_last: int) -> int:
        """The oldest step of the newest ``keep_last``, whichever start they are of; -1 if there are fewer, or none of
        this one: of those before it nobody knows here that they were read back.
        """
        newest = sorted([*(step for _, step in self.earlier), *self.complete])[-keep_last:]
        return newest[0] if self.complete and len(newest) == keep_last else -1

    def is_of(self, other: "Told") -> bool:
        """Whether both are of the same start of the same run."""
        return (self.run_id, self.start) == (other.run_id, other.start)


@dataclass(frozen=True)
class _File:
    """One committed shard, of this writer or of one that is no more."""

    place: ShardPlace
    run_id: str
    step: int
    start: str

    @classmethod
    def of(cls, place: ShardPlace) -> "_File":
        name = SnapshotName.parse(place.directory)
        assert name is not None
        return cls(place, name.run_id, name.step, name.start)


class Belongings:
    """The files of one share at one level. Every method blocks. Raises: LevelError."""

    def __init__(self, store: "SnapshotStore", level: PersistentLevel, share: Share) -> None:
        self._store = store
        self._level = level
        self._share = share
        self._files: dict[str, _File] | None = None
        """By path of the manifest; ``None``: not looked yet."""
        self._written: dict[str, _File] = {}
        self._named_for: Told | None = None
        self._named: set[int] = set()
        """Surplus that the owner heard of."""

    def confirm(self, entry: Entry, manifest: Manifest, beat: Beat) -> None:
        """Read back what was just committed, and what it refers to. Raises: ShardCorrupt, and it is no snapshot now."""
        store, place = self._store, self._store.place(entry)
        self._add(_File.of(place))
        if not (not store.storage.checks_writes if self._level.verify is None else self._level.verify):
            return
        try:
            store.check_frozen(entry, beat)
        except (FormatError, FileNotFoundError) as error:
            raise self._damaged(entry, error) from error  # images may be written again, for a later snapshot
        try:
            store.verify_entry(entry, beat)
        except (FormatError, FileNotFoundError) as error:
            place.withdraw()
            self._drop(place)
            # Its bytes as well: a place where all is read back damaged would fill up. If that fails, the next sweep.
            if not place.why_it_stays():
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
            if SnapshotName.parse(directory) is None:
                continue
            beat()
            for name in storage.list(directory):
                parsed = parse_file_name(name)
                if parsed is not None and parsed[1] == "json" and self._share.has(parsed[0]):
                    yield _File.of(ShardPlace(storage, directory, parsed[0]))

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
        gone = []
        for file in sorted(going, key=lambda file: (file.step, file.start)):
            beat()
            if self._is_named(file) or file.place.why_it_stays():
                continue  # the next time
            file.place.delete()
            self._drop(file.place)
            gone.append(file.step)
        return gone

    def _over(self, told: Told, files: Iterable[_File]) -> Iterator[_File]:
        """What the rules of retention leave nothing of, but for names and readers."""
        of_run = [file for file in files if file.run_id == told.run_id]
        steps = sorted({file.step for file in of_run if file.start == told.start})
        old = {*expired(steps, self._level, sound=told.complete), *(told.void - set(told.complete))}
        complete = tuple(kept(steps, self._level, told.complete))
        floor = replace(told, complete=complete).floor(self._level.keep_last)
        for file in of_run:
            if file.start == told.start:
                if file.step in old:
                    yield file
            # Of an earlier start, and passed: nobody counts any more how much of it is there.
            elif file.start < told.start and floor >= 0 and file.step <= complete[-1]:
                is_kept = file.step >= floor and (file.start, file.step) in told.earlier
                if not is_kept and not is_wanted(self._level, file.step):
                    yield file

    def _is_named(self, file: _File) -> bool:
        return any(map(parse_keep_file_name, self._store.storage.list(file.place.directory, keep_file_name(""))))

    def surplus(self, told: Told, protect: frozenset[int], ahead: int, beat: Beat) -> list[int]:
        """Steps that are not known to be complete, and more than there may be: their owner should take them back.

        ``ahead``: persisted steps that others may be behind. Where one of them fails for longer, what the others wrote
        meanwhile is complete nowhere. What a rank with slower storage may be writing stays (``meeting_points``). Each
        is named once for what is ``told``: until the owner says more it cannot act.
        """
        if told is not self._named_for:
            self._named_for, self._named = told, set()
        files = self._written if self._files is None else self._files
        of_start = (told.run_id, told.start)
        mine = {one.step: one for one in files.values() if (one.run_id, one.start) == of_start}
        newest = kept(sorted(mine), self._level, told.complete)
        oldest = newest[0] if len(newest) == self._level.keep_last else -1  # what is older goes in any case
        waiting = sorted(step for step in mine if step > oldest and step not in told.complete)
        passed = told.void | protect | self._named | meeting_points(waiting, self._level)
        found = []
        for step in waiting[: -(self._level.keep_last + ahead)]:
            if step not in passed:
                beat()
                if not self._is_named(mine[step]):
                    found.append(step)
        self._named.update(found)
        return found
