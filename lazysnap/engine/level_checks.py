"""Which levels are one place for all nodes? What several nodes hold is stored once there.

Object stores are one place if all nodes were given the same URL. A path is tried: rank 0 writes a small file of a new
name, and one rank of each node looks for it. Where that fails, or takes too long, each node stores all that it holds.
"""

import logging
from collections.abc import Callable, Sequence

from lazysnap.config import PersistentLevel, is_path
from lazysnap.levels import open_store
from lazysnap.levels.storage import Storage, probe_name
from lazysnap.levels.watchdog import Beat, Watchdog
from lazysnap.ranks.world import World

logger = logging.getLogger("lazysnap.engine")

_DEADLINE_S = 10.0


def shared_levels(world: World, levels: Sequence[PersistentLevel]) -> list[str]:
    """Return the URLs of the levels that are one place for all nodes, as this node knows them.

    None, if there is one node. Collective, with several nodes. Blocks: at most some seconds for each level.
    Raises: WaitTimeout.
    """
    num_nodes = len({place.node for place in world.places})
    if not levels or num_nodes == 1:
        return []
    name = probe_name()
    tried = [level for level in levels if level.shared is None and is_path(level.url)]
    tried_by_this_rank = tried if world.rank == 0 else []

    def write() -> list[str]:
        for level in tried_by_this_rank:
            _try(level, lambda storage: storage.put(name, b"lazysnap"))
        return [name, *(level.url for level in levels)]

    first_name, *first_urls = world.exchange_after("trying levels", write)[0]

    def look() -> list[bool] | None:
        if world.place.local_rank != 0:
            return None
        return [_is_first_place(level, url, first_name) for level, url in zip(levels, first_urls, strict=False)]

    answers = world.exchange_after("looking for what rank 0 wrote", look)
    for level in tried_by_this_rank:
        _try(level, lambda storage: storage.delete(name))
    nodes = [answer for answer in answers if answer is not None]
    return [level.url for index, level in enumerate(levels) if all(node[index] for node in nodes)]


def _is_first_place(level: PersistentLevel, first_url: str, first_name: str) -> bool:
    """True if a level is the place that rank 0 knows by ``first_url``, where it wrote ``first_name``. Blocks."""
    if level.shared is not None:
        return level.shared
    if not is_path(level.url):
        return level.url == first_url
    return _try(level, lambda storage: storage.size(first_name) > 0)


def _try(level: PersistentLevel, work: Callable[[Storage], bool | None]) -> bool:
    """Return the result of ``work``; ``False``, if it fails or takes too long."""

    def watched(beat: Beat) -> bool | None:
        return work(open_store(level.url).watched(beat).storage)

    attempt = Watchdog(watched, f"trying {level.url}")
    try:
        return attempt.result(min(_DEADLINE_S, level.timeout_s)) is True
    except Exception as error:  # noqa: BLE001  storage packages may raise anything
        logger.info("%s: %s", level.url, error)
        return False
