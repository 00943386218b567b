"""The levels that are one place for all nodes: what several nodes hold is stored once there.

Object stores are one place, if all nodes were given the same URL. Whether a path is, is tried: rank 0 writes a small
file of a new name, and one rank of each node looks for it. Where that fails, or takes too long, each node stores all
that it holds.
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
    """URLs of the levels that are one place for all nodes, as this node knows them; none, if there is one node.

    Collective, with several nodes. Blocks: at most some seconds for each level. Raises: WaitTimeout.
    """
    if not levels or len({place.node for place in world.places}) == 1:
        return []
    tried = [level for level in levels if is_path(level.url)]
    token = probe_name()

    def write() -> list[str]:
        for level in tried if world.rank == 0 else ():
            _try(level, lambda storage: storage.put(token, b"lazysnap"))
        return [token, *(level.url for level in levels)]

    first, *urls = world.exchange_after("trying levels", write)[0]

    def look() -> list[bool] | None:
        if world.place.local_rank:
            return None
        found = []
        for level, url in zip(levels, urls, strict=False):
            if level in tried:
                found.append(_try(level, lambda storage: storage.size(first) > 0))
            else:
                found.append(level.url == url)
        return found

    seen = [found for found in world.exchange_after("looking for what rank 0 wrote", look) if found is not None]
    for level in tried if world.rank == 0 else ():
        _try(level, lambda storage: storage.delete(token))
    everywhere = [all(found) for found in zip(*seen, strict=False)]
    return [level.url for level, is_shared in zip(levels, everywhere, strict=False) if is_shared]


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
