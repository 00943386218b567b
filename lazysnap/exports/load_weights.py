"""``lazysnap.load_weights``: the weights of a model from a snapshot of any number of ranks, without a trainer."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from lazysnap.config import checked_url
from lazysnap.errors import StateMismatch
from lazysnap.exports.states import read_state
from lazysnap.exports.weights import LIGHTNING_WEIGHTS, MODEL, is_lightning
from lazysnap.levels import open_store
from lazysnap.runs import LATEST
from lazysnap.shard.manifest import TAG
from lazysnap.snapshots.reader import OpenSnapshot, open_best
from lazysnap.snapshots.whole import WholeSnapshot
from lazysnap.state.source import KEY


def load_weights(
    url: "str | os.PathLike[str]",
    which: "str | int" = LATEST,
    *,
    part: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ``state_dict()`` of a snapshot's model, on the CPU: ``model.load_state_dict(load_weights(url))``.

    ``url``: a level, as in ``PersistentLevel``. ``which``: ``"latest"``, a step, a name given by ``keep``,
    or ``"run:1f3a"`` (also ``"run:1f3a@200"``) for the run whose id begins so.
    ``part``: an object of the state, as given to ``SnapshotEngine``. Default: the module of a Lightning fit, else the
    object named ``"model"``. The result has no names of wrappers (DDP, ``torch.compile``). Sharded tensors are whole,
    tied ones are one tensor.

    Reads only the weights, from files of any number of ranks, and compares checksums. ``"latest"`` skips a snapshot
    that is damaged or has no such part, with a warning. No keeper and no process group is needed. If the training that
    writes there deletes the snapshot meanwhile, the next newest is read.
    Blocks. Raises: SnapshotNotFound; StateMismatch, if no snapshot has such a part; ShardCorrupt, for a step, name or
    run; UnsupportedState, for a value of a type that is not registered here; LevelError; ConfigError.
    """
    store = open_store(checked_url("load_weights", url), options=storage_options)
    return open_best(
        store, lambda seen: seen.meant(which), lambda one: _read(one, part), repr(which), is_strict=which != LATEST
    )


def _read(snapshot: OpenSnapshot, part: str | None) -> dict[str, Any]:
    where = f"{snapshot.plan.level}: step {snapshot.plan.step}"
    with contextlib.closing(snapshot):
        return read_state(WholeSnapshot(snapshot), lambda state: _part(state, part, where))


def _part(state: Any, part: str | None, where: str) -> Any:
    """Return the encoded state dict of one object of the state. Raises: StateMismatch."""
    objects = state if isinstance(state, dict) and TAG not in state else {}
    name = part if part is not None else LIGHTNING_WEIGHTS if is_lightning(objects) else MODEL
    if name not in objects:
        found = sorted(objects.keys() - {KEY})
        raise StateMismatch(
            f"{where} has no part {name!r}, its parts are {found}: name one, as load_weights(..., part=...)"
        )
    return objects[name]
