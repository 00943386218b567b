"""``lazysnap.load_weights``: the weights of a model from a snapshot of any number of ranks, without a trainer."""

import contextlib
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from lazysnap.config import checked_url
from lazysnap.errors import FormatError, SnapshotNotFound, StateError
from lazysnap.exports.states import read_state
from lazysnap.exports.weights import LIGHTNING_WEIGHTS, MODEL, is_lightning
from lazysnap.levels.store import open_storage
from lazysnap.resolver import LATEST
from lazysnap.shard.manifest import EXTRAS, TAG
from lazysnap.snapshots.assembly import WholeSnapshot
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import OpenSnapshot, open_snapshot, retry_if_deleted

logger = logging.getLogger(__name__)


def load_weights(
    url: "str | os.PathLike[str]",
    which: "str | int" = LATEST,
    *,
    part: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ``state_dict()`` of a snapshot's model, on the CPU.

    Only the weights are read, from files of any number of ranks, and verified. Sharded tensors are whole, tied ones are
    one tensor. No keeper and no process group is needed. If a running training deletes the snapshot meanwhile, the next
    newest is read. Blocks without a deadline, also if a mount hangs.

    Args:
        url: the path or URL of a level, as in ``PersistentLevel``.
        which: ``"latest"``, which skips a snapshot that is damaged or has no such part, with a warning; a step, a name
            given by ``keep``, or ``"run:1f3a@200"``.
        part: an object of the state, as given to ``SnapshotEngine``. By default the module of a Lightning fit, else
            the object named ``"model"``.
        storage_options: options for the file system of the level, as in ``PersistentLevel``.

    Returns: weights by name, without names of wrappers (DDP, ``torch.compile``).

    Raises: SnapshotNotFound; StateError, if no snapshot has such a part, or for a value of a type that is not
    registered here; FormatError, for a step, name or run; LevelError; ConfigError.

    Example::

        model.load_state_dict(lazysnap.load_weights("runs/lazysnap"))
    """
    storage = open_storage(checked_url("load_weights", url), options=storage_options)
    return retry_if_deleted(storage, partial(_load, which, part))


def _load(which: str | int, part: str | None, catalogue: Catalogue) -> dict[str, Any]:
    """Return the weights of the first snapshot that can be read; for ``latest`` others are skipped."""
    errors: list[FormatError | StateError] = []
    skipped: list[str] = []
    for plan in catalogue.plans_for(which):
        try:
            weights = _read(open_snapshot(catalogue, plan), part)
        except (FormatError, StateError) as error:
            if which != LATEST:
                raise
            errors.append(error)
            skipped.append(f"step {plan.step} skipped: {error}")
        else:
            for problem in [*catalogue.problems, *catalogue.incomplete, *skipped]:
                logger.warning("%s", problem)
            return weights
    if errors and isinstance(errors[0], StateError):
        raise errors[0]
    url = catalogue.storage.url
    problems = [*catalogue.problems, *catalogue.incomplete, *skipped]
    details = ""
    if problems:
        details = f"; found: {'; '.join(problems[:8])}"
    raise SnapshotNotFound(
        f"{url}: no complete snapshot {which!r} that can be read{details}; `lazysnap ls {url}` lists the contents"
    )


def _read(snapshot: OpenSnapshot, part: str | None) -> dict[str, Any]:
    where = f"{snapshot.plan.level}: step {snapshot.plan.step}"
    with contextlib.closing(snapshot):
        return read_state(WholeSnapshot(snapshot), partial(_part, part, where))


def _part(part: str | None, where: str, state: Any) -> Any:
    """Return the encoded state dict of one object of the state. Raises: StateError."""
    objects: dict[str, Any] = {}
    if isinstance(state, dict) and TAG not in state:
        objects = state
    name = MODEL
    if part is not None:
        name = part
    elif is_lightning(objects):
        name = LIGHTNING_WEIGHTS
    if name not in objects:
        parts = sorted(objects.keys() - {EXTRAS})
        raise StateError(
            f"{where} has no part {name!r}, its parts are {parts}: name one, as load_weights(..., part=...)"
        )
    return objects[name]
