"""The contents of all levels, read by all ranks together: each reads its share of the manifests.

Names come first. One rank lists a URL, and one rank of each node lists a path. Nodes that see the same directories,
inode and times included, share one place and its work. The ranks of a node share a disk that only this node sees.
"""

import dataclasses
import json
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from lazysnap import faults
from lazysnap.config import is_path
from lazysnap.levels.listing import Directory, Listing, without_manifest
from lazysnap.ranks.world import World
from lazysnap.resolver import Inventory, joined
from lazysnap.restore.level import Answer, Level
from lazysnap.shard.names import SnapshotName
from lazysnap.topology import Place

logger = logging.getLogger("lazysnap.engine")

_Result = TypeVar("_Result")
_SILENCE_S = 3.0
"""Seconds that a level may be silent before a warning says that the restart waits for it."""


@dataclass(frozen=True)
class Site:
    """One place where shards are, and which ranks see it."""

    url: str
    label: str | None
    """``None``: all do."""
    listing: Listing
    members: tuple[int, ...]


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
        """Snapshots that a listing shows and that cannot be restored: a file has no manifest, or the manifests were
        not read in time. With the message about each. The same on every rank."""
        self.late: set[str] = set()
        """Levels that did not answer in time. The same on every rank."""
        self.unanswered: dict[str, Answer[Listing]] = {}
        """Listings of late levels that this rank began."""
        self._named: set[str] = set()
        """Levels for which that warning was given."""

    def look(self, problems: list[str], patience_s: float | None = None) -> list[Inventory]:
        """Return what all ranks found, the same list on each. Adds what this one could not read to ``problems``.
        Collective.

        ``patience_s``: how long levels are waited for in all; ``None``: as long as their settings say.
        """
        until = None if patience_s is None else time.monotonic() + patience_s
        self.unanswered.clear()
        names = self._world.exchange_after("what is on storage", lambda: self._names(problems, until))
        sites = sites_of([mine for mine, _ in names], self._world.places)
        listed = [
            (site.url, directory, name)
            for site in sites
            for directory in site.listing.directories
            if (name := SnapshotName.parse(directory.name)) is not None
        ]
        self.uncommitted = Counter(url for url, directory, _ in listed if not directory.ranges)
        looked = self._world.exchange_after("what of it is whole", lambda: self._mine(sites, problems, until))
        late = {url for _, urls in looked for url in urls}
        self.late = late | {url for _, urls in names for url in urls}
        reasons = [(name, _why_unread(url, name, directory, is_late=url in late)) for url, directory, name in listed]
        self.unread = [(name, text) for name, text in reasons if text]
        return merged([msgspec.convert(item, Inventory) for mine, _ in looked for item in mine])

    def follow(self, restored: SnapshotName, *, before: str) -> None:
        """Log what late levels have that is newer than the snapshot that was ``restored``, when they answer.

        ``before``: the id of the start that goes on now. What that start, or a later one, stored does not count.
        Does not block.
        """
        for url, listing in self.unanswered.items():
            threading.Thread(
                target=_tell_newer, args=(url, listing, restored, before), name="lazysnap-late-level", daemon=True
            ).start()

    def _names(self, problems: list[str], until: float | None) -> list[Any]:
        """The listings of this rank, each with its URL, and the URLs of levels that did not answer in time."""
        place = self._world.place
        mine = []
        begun = [
            (url, level.begin_names(marked=is_path(url)))
            for url, level in self._levels.items()
            if place.rank == 0 or (place.local_rank == 0 and is_path(url))
        ]
        for url, listing in begun:
            if not listing.comes(until):
                self.unanswered[url] = listing
                problems.append(
                    f"{url} is not waited for: memory has a whole snapshot. What is newer there is logged when "
                    "it answers"
                )
                continue
            if (found := self._result(url, listing, until, problems)) is not None:
                mine.append([url, msgspec.to_builtins(found)])
        return [mine, list(self.unanswered)]

    def _mine(self, sites: list[Site], problems: list[str], until: float | None) -> list[Any]:
        """The inventories of this rank's shares, and the URLs of levels that did not answer in time."""
        rank = self._world.rank
        begun, found, late = [], [], []
        for site in sites:
            if rank not in site.members:
                continue
            if site.label is not None:
                self.reach.add(site.label)
            share = (site.members.index(rank), len(site.members))
            # Problems of the listing are reported once.
            listing = site.listing if share[0] == 0 else dataclasses.replace(site.listing, problems=())
            begun.append((site, self._levels[site.url].begin_look(listing, share)))
        for site, looked in begun:
            if not looked.comes(until):
                late.append(site.url)
                continue
            if (inventory := self._result(site.url, looked, until, problems)) is not None:
                entries = tuple(dataclasses.replace(entry, node=site.label) for entry in inventory.entries)
                found.append(msgspec.to_builtins(dataclasses.replace(inventory, entries=entries)))
        faults.point("restore.surveyed")
        return [found, late]

    def _result(self, url: str, answer: Answer[_Result], until: float | None, problems: list[str]) -> _Result | None:
        """Return the answer of a level; ``None``, and a problem, if it has none. Blocks.

        Without a deadline of a few seconds the user is warned, once for each level, that the restart waits.
        """
        if until is None and url not in self._named and not answer.comes(time.monotonic() + _SILENCE_S):
            self._named.add(url)
            logger.warning(
                "%s does not answer yet: the restart waits for it, at most %g s without progress "
                "(PersistentLevel.timeout_s), then goes on without it",
                url,
                answer.timeout_s,
            )
        try:
            return answer()
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            problems.append(f"{url} passed over: {str(error) or repr(error)}")
            return None


def _tell_newer(url: str, listing: Answer[Listing], restored: SnapshotName, before: str) -> None:
    where = url
    try:
        directories = listing().directories
    except Exception as error:  # noqa: BLE001  storage packages may raise anything
        logger.warning(
            "%s: whether it has a snapshot newer than step %d, which was resumed from memory, is not known: %s",
            *(where, restored.step, error),
        )
        return
    names = (SnapshotName.parse(directory.name) for directory in directories if directory.is_whole)
    newest = max((name for name in names if name is not None and name.start < before), default=restored)
    if newest <= restored:
        logger.info("%s answered: it has nothing newer than step %d, which was resumed", where, restored.step)
        return
    logger.warning(
        "%s answered late and has step %d (%s), newer than step %d, which was resumed from memory. To go on from "
        "there, stop this training and start it again while that level answers",
        *(where, newest.step, newest.directory, restored.step),
    )


def _why_unread(url: str, name: SnapshotName, directory: Directory, *, is_late: bool) -> str:
    """Return why a snapshot that a listing shows cannot be restored; empty, if no reason is known."""
    if directory.bare:
        return without_manifest(url, name.step, directory)
    if is_late and directory.is_whole:
        return (
            f"step {name.step} passed over: {url}/{directory.name}: its manifests were not read in time; to go "
            "on from there, stop this training and start it again when that level is faster"
        )
    return ""


def sites_of(listed: list[Any], places: list[Place]) -> list[Site]:
    """Return all places. ``listed``: by rank, ``[url, listing]``. Pure."""
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, found in enumerate(listed):
        for url, fields in found:
            seen[url, json.dumps(fields)].append(rank)
    of_node: dict[str, list[int]] = defaultdict(list)
    for place in places:
        of_node[place.node].append(place.rank)
    sites = []
    for (url, fields), listers in seen.items():
        nodes = dict.fromkeys(places[rank].node for rank in listers) if is_path(url) else of_node
        label = None if len(nodes) == len(of_node) else f"{url} of rank {listers[0]}"
        members = tuple(sorted(rank for node in nodes for rank in of_node[node]))
        sites.append(Site(url, label, msgspec.json.decode(fields, type=Listing), members))
    return sites


def merged(inventories: list[Inventory]) -> list[Inventory]:
    """One of each level."""
    by_level: dict[str, list[Inventory]] = defaultdict(list)
    for inventory in inventories:
        by_level[inventory.level].append(inventory)
    return [joined(found) for found in by_level.values()]
