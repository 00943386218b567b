"""An image that several ranks hold alike, written by one of them."""

import contextlib
import time
from collections.abc import Callable

from lazysnap.errors import LevelUnavailable, NameTaken
from lazysnap.levels.files import TEMP_MARK
from lazysnap.levels.shards import ShardPlace
from lazysnap.shard.manifest import Manifest

_PUBLISHED_S = 300.0
"""How long the commit of a shard that is published is waited for."""
_UNPUBLISHED_S = 30.0
"""How long another one's unpublished bytes are: only to save the work, they may be those of a dead writer."""
_POLL_S, _MOST_POLL_S = 0.02, 1.0
"""Each time twice as long: what is asked of a place must not grow with the number of those that wait for one."""
_BEAT_S = 0.2


def write_once(
    place: ShardPlace,
    committed: Callable[[], Manifest | None],
    write: Callable[[], Manifest],
    beat: Callable[[], None] | None = None,
) -> Manifest:
    """``write``, unless another process has done so, or is at it: then wait until it has, or is dead.

    Raises: LevelUnavailable, if the other one does not end within some minutes; what ``write`` raises.
    """
    started, rest_s = time.monotonic(), _POLL_S
    while True:
        manifest = committed()
        if manifest is not None:
            return manifest
        waited_s = time.monotonic() - started
        names = _uncommitted(place)
        is_published = place.shard_path.rpartition("/")[2] in names
        if not is_published and (not names or waited_s > _UNPUBLISHED_S):
            # If another one published meanwhile, its commit comes, or it died before it.
            with contextlib.suppress(NameTaken):
                return write()
        if waited_s > _PUBLISHED_S:
            raise LevelUnavailable(
                f"{place.where}: another writer is at it, or died at it; the next snapshot is tried again"
            )
        _rest(rest_s, beat)
        rest_s = min(2 * rest_s, _MOST_POLL_S)


def _rest(seconds: float, beat: Callable[[], None] | None) -> None:
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        if beat is not None:
            beat()
        time.sleep(min(left_s, _BEAT_S))


def _uncommitted(place: ShardPlace) -> set[str]:
    """What a writer that may live has left there; what dead ones left is removed."""
    shard = place.shard_path.rpartition("/")[2]
    names = [name for name in place.storage.list(place.directory) if TEMP_MARK in name or name == shard]
    unless = {shard: place.manifest_path}
    return {
        name
        for name in names
        if not place.storage.delete_abandoned(f"{place.directory}/{name}", unless=unless.get(name))
    }
