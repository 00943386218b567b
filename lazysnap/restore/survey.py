"""Reads the contents of all levels, with all ranks together: each reads its share of the manifests.

Names come first. One rank lists a URL, and one rank of each node lists a path. Nodes that see the same directories,
with equal inodes and times, share one place and its work. The ranks of a node share a disk that only this node sees.

All ranks receive the results of each rank. If several ranks have equal listings, one of them sends it. The manifests of
the newest snapshots are read first: a restart needs no others unless these are damaged. See ``restore.offers`` for the
messages.
"""

import dataclasses
import json
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import xxhash

from lazysnap import faults
from lazysnap.config import is_path
from lazysnap.levels.listing import Directory, Listing, without_manifest
from lazysnap.levels.watchdog import Watchdog
from lazysnap.ranks.world import Place, World
from lazysnap.resolver import Inventory, entries_in
from lazysnap.restore.level import Level
from lazysnap.restore.offers import pack_files, unpack_files
from lazysnap.shard.names import SnapshotName

logger = logging.getLogger("lazysnap.engine")

_Result = TypeVar("_Result")
IsWanted = Callable[[SnapshotName, Collection[str]], bool]
"""True for a snapshot that may be restored, by the name of its directory and the names that users gave it."""
NEWEST = 16
"""Snapshots whose manifests are read first."""
_SILENCE_S = 3.0
"""Seconds that a level may be silent before a warning says that the restart waits for it."""


@dataclass(frozen=True)
class Site:
    """A place that holds shards, and the ranks that see it."""

    url: str
    label: str | None
    """``None``: all ranks see it."""
    listing: Listing
    members: tuple[int, ...]

    def only(self, names: Collection[str]) -> "Site":
        """Return the same place with only these directories."""
        directories = [directory for directory in self.listing.directories if directory.name in names]
        return dataclasses.replace(self, listing=Listing(tuple(directories), self.listing.problems))


@dataclass(frozen=True)
class Selection:
    """The snapshots at all sites, split into those whose manifests are read first, and the others."""

    newest: frozenset[SnapshotName]
    """The newest ones."""
    first: frozenset[str]
    """Directories that are read first."""
    rest: frozenset[str]
    """All others."""

    @classmethod
    def of(cls, sites: Iterable[Site], is_wanted: IsWanted | None, limit: int) -> "Selection":
        """Select the newest snapshots and the newest wanted ones, at least one of each run. Pure.

        Args:
            sites: all places.
            is_wanted: True for the snapshots that may be restored; ``None``: the newest one is wanted.
            limit: the number of the newest ones.
        """
        names: set[SnapshotName] = set()
        eligible: set[SnapshotName] = set()
        for site in sites:
            for directory in site.listing.directories:
                if not directory.ranges:
                    continue
                name = directory.snapshot
                names.add(name)
                if is_wanted is not None and is_wanted(name, directory.names):
                    eligible.add(name)
        newest = sorted(names, reverse=True)[:limit]
        newest_of_run = {name.run_id: name for name in sorted(eligible)}
        chosen = {*newest, *sorted(eligible, reverse=True)[:limit], *newest_of_run.values()}
        first = frozenset(name.directory for name in chosen)
        rest = frozenset(name.directory for name in names - chosen)
        return cls(frozenset(newest), first, rest)


class Survey:
    """The listing of levels on one rank."""

    def __init__(self, world: World, levels: Mapping[str, Level]) -> None:
        self._world = world
        self._levels = levels
        self.reach: set[str] = set()
        """Labels of the places that only some ranks see, this one among them."""
        self.uncommitted: Counter[str] = Counter()
        """The number of snapshot directories without any manifest, by level. The same on every rank."""
        self.unread: list[tuple[SnapshotName, str]] = []
        """Listed snapshots that cannot be restored, because a file has no manifest, or the manifests were not read in
        time, with the message about each. The same on every rank.
        """
        self.late: set[str] = set()
        """Levels that did not answer in time. The same on every rank."""
        self.unanswered: dict[str, Watchdog[Listing]] = {}
        """Listings of late levels that this rank began."""
        self.names: list[SnapshotName] = []
        """Every snapshot of which some part is committed, whether its manifests were read or not. The same on every
        rank."""
        self.newest: frozenset[SnapshotName] = frozenset()
        """The newest of them, whose manifests were read."""
        self._unread_sites: list[Site] = []
        """Places with the snapshots whose manifests were not read yet."""
        self._listings: dict[str, str] = {}
        """The listings of this rank as JSON, by URL."""
        self._reported_silent: set[str] = set()
        """Levels for which a warning said that the restart waits for them."""

    @property
    def is_partial(self) -> bool:
        """True if there are snapshots whose manifests were not read yet. The same on every rank."""
        return len(self._unread_sites) > 0

    def read_newest(
        self, problems: list[str], patience_s: float | None = None, is_wanted: IsWanted | None = None
    ) -> list[Inventory]:
        """Return the contents of all levels, with the newest manifests; the same on each rank. Collective.

        Args:
            problems: receives a line for each part that this rank could not read.
            patience_s: deadline for all levels together; ``None``: each has the deadline of its settings.
            is_wanted: true for the snapshots that may be restored; ``None``: the newest is wanted.
        """
        deadline = None
        if patience_s is not None:
            deadline = time.monotonic() + patience_s
        self.unanswered.clear()
        self.late = set()
        self.unread = []
        all_digests = []
        for digests, late in self._world.exchange_after("what is on storage", partial(self._list, problems, deadline)):
            all_digests.append(digests)
            self.late.update(late)
        sites = self._sites(all_digests)
        names = set()
        self.uncommitted = Counter()
        for site in sites:
            for directory in site.listing.directories:
                if directory.ranges:
                    names.add(directory.snapshot)
                else:
                    self.uncommitted[site.url] += 1
        self.names = sorted(names)
        selection = Selection.of(sites, is_wanted, NEWEST)
        self.newest = selection.newest
        inventories = self._read([site.only(selection.first) for site in sites], problems, deadline)
        self._unread_sites = []
        if selection.rest:
            self._unread_sites = [site.only(selection.rest) for site in sites]
        for site in sites:
            for directory in site.listing.directories:
                reason = _why_unread(site.url, directory, is_late=site.url in self.late)
                if reason:
                    self.unread.append((directory.snapshot, reason))
        return inventories

    def read_rest(self, problems: list[str]) -> list[Inventory]:
        """Return the contents of all levels for the snapshots that ``read_newest`` did not read. Collective."""
        sites = [dataclasses.replace(site, listing=Listing(site.listing.directories)) for site in self._unread_sites]
        self._unread_sites = []
        return self._read(sites, problems, None)

    def follow(self, restored: SnapshotName, *, before: str) -> None:
        """Log the snapshots of late levels that are newer than the ``restored`` one, when these levels answer.

        ``before``: the id of this start. Snapshots of this start, or of a later one, do not count. Does not block.
        """
        for url, listing in self.unanswered.items():
            threading.Thread(
                target=_log_newer, args=(url, listing, restored, before), name="lazysnap-late-level", daemon=True
            ).start()

    # Names

    def _list(self, problems: list[str], deadline: float | None) -> list[Any]:
        """Return the digests of the listings of this rank by URL, and the URLs of levels that did not answer in
        time."""
        place = self._world.place
        self._listings = {}
        begun = {}
        for url, level in self._levels.items():
            if place.rank == 0 or (place.local_rank == 0 and is_path(url)):
                begun[url] = level.begin_names(stamped=is_path(url))
        for url, answer in begun.items():
            if _is_late(answer, deadline):
                self.unanswered[url] = answer
                problems.append(
                    f"{url} is not waited for: memory has a whole snapshot. What is newer there is logged when "
                    "it answers"
                )
                continue
            listing = self._result(url, answer, deadline, problems)
            if listing is not None:
                self._listings[url] = json.dumps(msgspec.to_builtins(listing), separators=(",", ":"))
        return [{url: digest_of(text) for url, text in self._listings.items()}, list(self.unanswered)]

    def _sites(self, digests: list[dict[str, str]]) -> list[Site]:
        """Return all places. ``digests``: of listings by URL, of each rank. Collective."""
        to_send = {}
        for url, text in self._listings.items():
            if first_with(digests, url, digest_of(text)) == self._world.rank:
                to_send[url] = text
        listings = {}
        for texts in self._world.exchange("names on storage", to_send):
            for url, text in texts.items():
                listings[url, digest_of(text)] = msgspec.json.decode(text, type=Listing)
        return sites_of(digests, listings, self._world.places)

    # Manifests

    def _read(self, sites: list[Site], problems: list[str], deadline: float | None) -> list[Inventory]:
        """Return the contents of these sites, read by all ranks; adds to ``late``. Collective."""
        read_share = partial(self._read_share, sites, problems, deadline)
        inventories = []
        for packed_sites, late in self._world.exchange_after("what of it is whole", read_share):
            self.late.update(late)
            for number, distance, packed in packed_sites:
                site = sites[number]
                inventories.append(unpack_files(packed, site.listing.directories, site.url, distance, site.label))
        return merged(inventories)

    def _read_share(self, sites: list[Site], problems: list[str], deadline: float | None) -> list[Any]:
        """Return the contents of this rank's shares, and the URLs of late levels.

        The contents of a share are packed, after the number of the site and its distance.
        """
        rank = self._world.rank
        begun = []
        for number, site in enumerate(sites):
            if rank not in site.members:
                continue
            if site.label is not None:
                self.reach.add(site.label)
            index = site.members.index(rank)
            listing = site.listing
            if index > 0:
                listing = dataclasses.replace(listing, problems=())  # the first member reports them
            share = (index, len(site.members))
            begun.append((number, self._levels[site.url].begin_inventory(listing, share)))
        packed_sites = []
        late = []
        for number, answer in begun:
            url = sites[number].url
            if _is_late(answer, deadline):
                late.append(url)
                continue
            inventory = self._result(url, answer, deadline, problems)
            if inventory is None:
                continue
            packed = pack_files(inventory, sites[number].listing.directories)
            if any(packed):
                # The level of a rank may have another URL than that of any other rank.
                packed_sites.append([number, self._levels[url].distance, packed])
        faults.point("restore.surveyed")
        return [packed_sites, late]

    def _result(
        self, url: str, answer: Watchdog[_Result], deadline: float | None, problems: list[str]
    ) -> _Result | None:
        """Return the answer of a level; ``None``, after adding a problem, if it has none. Blocks.

        Without the short deadline the user is warned, once for each level, that the restart waits.
        """
        warns = deadline is None and url not in self._reported_silent
        if warns and not answer.wait(_SILENCE_S):
            self._reported_silent.add(url)
            logger.warning(
                "%s does not answer yet: the restart waits for it, at most %g s without progress "
                "(PersistentLevel.timeout_s), then continues without it",
                url,
                answer.timeout_s,
            )
        try:
            return answer.result()
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            problems.append(f"{url} skipped: {str(error) or repr(error)}")
            return None


def _is_late(answer: Watchdog[_Result], deadline: float | None) -> bool:
    """True if there is neither an answer nor an error at that monotonic time. Blocks. ``None``: no deadline."""
    return deadline is not None and not answer.wait(max(0.0, deadline - time.monotonic()))


def _log_newer(url: str, listing: Watchdog[Listing], restored: SnapshotName, before: str) -> None:
    try:
        directories = listing.result().directories
    except Exception as error:  # noqa: BLE001  storage packages may raise anything
        logger.warning(
            "%s: whether it has a snapshot newer than step %d, which was resumed from memory, is not known: %s",
            *(url, restored.step, error),
        )
        return
    newest = restored
    for directory in directories:
        if directory.is_whole and directory.snapshot.start < before:
            newest = max(newest, directory.snapshot)
    if newest == restored:
        logger.info("%s answered: it has nothing newer than step %d, which was resumed", url, restored.step)
        return
    logger.warning(
        "%s answered late and has step %d (%s), newer than step %d, which was resumed from memory. To go on from "
        "there, stop this training and start it again while that level answers",
        *(url, newest.step, newest.directory, restored.step),
    )


def _why_unread(url: str, directory: Directory, *, is_late: bool) -> str:
    """Return the reason why a listed snapshot cannot be restored; empty if none is known."""
    if directory.bare:
        return without_manifest(url, directory)
    if is_late and directory.is_whole:
        return (
            f"step {directory.snapshot.step} skipped: {url}/{directory.name}: its manifests were not read in time; "
            "to continue from there, stop this training and start it again when that level is faster"
        )
    return ""


def digest_of(text: str) -> str:
    """Return the digest of a listing, which is equal for equal listings of other ranks."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def first_with(digests: Sequence[Mapping[str, str]], url: str, digest: str) -> int:
    """Return the first rank with that listing of a URL. Pure."""
    return next(rank for rank, of_rank in enumerate(digests) if of_rank.get(url) == digest)


def sites_of(
    digests: Sequence[Mapping[str, str]], listings: Mapping[tuple[str, str], Listing], places: Sequence[Place]
) -> list[Site]:
    """Return all places. Pure.

    Args:
        digests: digests of the listings of each rank, by URL.
        listings: by URL and digest.
        places: of all ranks.
    """
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(digests):
        for url, digest in of_rank.items():
            seen[url, digest].append(rank)
    ranks_of_node: dict[str, list[int]] = defaultdict(list)
    for place in places:
        ranks_of_node[place.node].append(place.rank)
    sites = []
    for (url, digest), listers in seen.items():
        nodes = set(ranks_of_node)
        if is_path(url):
            nodes = {places[rank].node for rank in listers}
        label = None
        if len(nodes) < len(ranks_of_node):
            label = f"{url} of rank {listers[0]}"
        members: list[int] = []
        for node in nodes:
            members += ranks_of_node[node]
        sites.append(Site(url, label, listings[url, digest], tuple(sorted(members))))
    return sites


def merged(inventories: Iterable[Inventory]) -> list[Inventory]:
    """Merge the inventories of each level."""
    parts_of_level: dict[str, list[Inventory]] = defaultdict(list)
    for inventory in inventories:
        parts_of_level[inventory.level].append(inventory)
    levels = []
    for level, parts in parts_of_level.items():
        problems: list[str] = []
        for part in parts:
            problems += part.problems
        levels.append(Inventory(level, tuple(entries_in(parts)), tuple(problems)))
    return levels
