"""Finds the levels that all nodes share: what several nodes hold is stored once there.

Object stores are shared if all nodes have the same URL. A path is tested: rank 0 writes a small file with a new name,
and one rank of each node looks for it. If the test fails or takes too long, each node stores everything that it holds.
"""

import logging
from collections.abc import Callable, Sequence

from lazysnap.config import PersistentLevel, is_path
from lazysnap.levels.storage import Storage, probe_name
from lazysnap.levels.store import open_storage
from lazysnap.levels.watchdog import Beat, Watchdog
from lazysnap.levels.watched import WatchedStorage
from lazysnap.ranks.world import World

logger = logging.getLogger("lazysnap.engine")

_DEADLINE_S = 10.0


def shared_levels(world: World, levels: Sequence[PersistentLevel]) -> list[str]:
    """Return the URLs of the levels that all nodes share, as far as this node knows; none with one node.

    Collective with several nodes. Blocks: at most some seconds for each level. Raises: WaitTimeout.
    """
    if not levels or len({place.node for place in world.places}) == 1:
        return []
    is_writer = world.rank == 0
    paths = [level for level in levels if is_path(level.url)]
    probe = probe_name()

    def write() -> list[str]:
        if is_writer:
            for level in paths:
                _try(level, lambda storage: storage.put(probe, b"lazysnap"))
        return [probe, *(level.url for level in levels)]

    probe_of_writer, *urls = world.exchange_after("trying levels", write)[0]

    def search() -> list[bool] | None:
        if world.place.local_rank:
            return None
        sees_writer = []
        for level, url in zip(levels, urls, strict=False):
            if level in paths:
                sees_writer.append(_try(level, lambda storage: storage.size(probe_of_writer) > 0))
            else:
                sees_writer.append(level.url == url)
        return sees_writer

    answers = world.exchange_after("looking for what rank 0 wrote", search)
    if is_writer:
        for level in paths:
            _try(level, lambda storage: storage.delete(probe))
    of_nodes = [answer for answer in answers if answer is not None]
    shared = []
    for level, *sees_writer in zip(levels, *of_nodes, strict=False):
        if all(sees_writer):
            shared.append(level.url)
    return shared


def _try(level: PersistentLevel, work: Callable[[Storage], bool | None]) -> bool:
    """Return the result of ``work``; False if it fails or takes too long."""

    def watched(beat: Beat) -> bool | None:
        return work(WatchedStorage(open_storage(level.url), beat))

    attempt = Watchdog(watched, f"trying {level.url}", min(_DEADLINE_S, level.timeout_s))
    try:
        return attempt.result() is True
    except Exception as error:  # noqa: BLE001  storage packages may raise anything
        logger.info("%s: %s", level.url, error)
        return False
