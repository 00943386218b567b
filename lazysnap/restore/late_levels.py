"""Levels that a restart from memory did not wait for: what such a level has that is newer is logged when it answers."""

import logging
import threading

from lazysnap.levels.listing import Listing
from lazysnap.levels.redaction import shown
from lazysnap.restore.level import Answer
from lazysnap.shard.names import SnapshotName

logger = logging.getLogger("lazysnap.engine")


def follow(url: str, listing: Answer[Listing], restored: SnapshotName, *, before: str) -> None:
    """Log what a level has that is newer than the snapshot that was ``restored``, when it answers. Does not block.

    ``before``: the id of the start that goes on now. What that start, or a later one, stored does not count.
    """

    def tell() -> None:
        where = shown(url)
        try:
            directories = listing().directories
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            logger.warning(
                "%s: whether it has a snapshot newer than step %d, which was resumed from memory, is not known: %s",
                where,
                restored.step,
                error,
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
            where,
            newest.step,
            newest.directory,
            restored.step,
        )

    threading.Thread(target=tell, name="lazysnap-late-level", daemon=True).start()
