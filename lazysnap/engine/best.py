"""The snapshots that are kept as the best by a metric: names and retention only.

The names of a run at its first level are the only record (``shard.best``). A restart reads them there, so captures
contain nothing about them.

A better value gets its name at once. A name that is worse than ``count`` others is released at the next call, but only
after these others are stored at every level. So the best snapshots always exist, and there are at most ``count + 1``
names.
"""

import logging
import math
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.config import KeepBest
from lazysnap.core.messages import KeeperState, NamedStep
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.run import Run
from lazysnap.shard.best import BestName, best_names

logger = logging.getLogger("lazysnap.engine")


@dataclass(frozen=True)
class _NameChange:
    """Changes of names that all ranks make."""

    new_name: str
    """The name that the snapshot gets; empty if it is not among the best."""
    released: tuple[str, ...]


class BestSnapshots:
    """Keeps the best snapshots of a run. Used on the training thread."""

    def __init__(self, run: Run, boundaries: Boundaries) -> None:
        self._run = run
        self._world = run.restart.world
        self._boundaries = boundaries
        self._recorder = run.recorder
        self._client = run.client
        self._wishes: dict[str, KeepBest] = {}
        """Arguments of the calls, by metric. The same on all ranks."""
        self._warned = False
        """True after a warning about a value that is no number."""

    def keep(self, wish: KeepBest, value: float) -> int | None:
        """See ``SnapshotEngine.keep_best``. Collective. Blocks."""
        self._wishes[wish.monitor] = wish
        change = self._agreed(self._change(wish, value))
        with self._boundaries.lock:
            self._release(change)
            faults.point("engine.best.released")
            if not change.new_name:
                return None
            return self._recorder.keep(change.new_name, is_over=not self._boundaries.has_stepped)

    def release_surplus(self) -> bool:
        """Release names that are no longer among the best. Collective. Returns: True if there were any."""
        has_released = False
        for wish in self._wishes.values():
            change = self._agreed(_NameChange("", self._surplus(wish)))
            with self._boundaries.lock:
                self._release(change)
            has_released = has_released or bool(change.released)
        return has_released

    def _agreed(self, change: _NameChange) -> _NameChange:
        """Return the change of rank 0. Collective. Raises: WaitTimeout."""
        if self._world.is_alone:
            return change
        changes = self._world.exchange("keeping the best", [change.new_name, list(change.released)])
        name, released = changes[0]
        return _NameChange(name, tuple(released))

    def _release(self, change: _NameChange) -> None:
        for name in change.released:
            self._recorder.release(name)

    def _change(self, wish: KeepBest, value: float) -> _NameChange:
        """Return the changes that this rank proposes for the value of the current step."""
        if self._world.rank != 0:
            return _NameChange("", ())  # the value of rank 0 counts
        self._await_listing()
        surplus = self._surplus(wish)
        if not math.isfinite(value):
            self._warn(wish, value)
            return _NameChange("", surplus)
        step = self._recorder.step_to_name(is_over=not self._boundaries.has_stepped)
        new = BestName.of(wish.monitor, wish.mode, value, step)
        num_better = 0
        present = self._present(new)
        for name in present:
            if name.sort_key <= new.sort_key:
                num_better += 1
        if num_better >= wish.count or new in present:
            return _NameChange("", surplus)
        return _NameChange(new.text, surplus)

    def _warn(self, wish: KeepBest, value: float) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("keep_best: %s is %s, which is never among the best (reported once)", wish.monitor, value)

    def _await_listing(self) -> None:
        """Block until the names of earlier starts are known, at most ``io_timeout_s``, once for each keeper."""
        if self._run.is_begun:
            self._client.wait(_is_listed, self._run.restart.config.io_timeout_s)

    def _present(self, like: BestName) -> list[BestName]:
        """Return the names of the same metric that snapshots of this run have or will get, the best first."""
        names = best_names(self._recorder.names(self._run.first_start))
        return [name for name in names if name.ranking == like.ranking]

    def _surplus(self, wish: KeepBest) -> tuple[str, ...]:
        """Return the names to release: worse than ``count`` others, which are stored at every level."""
        like = BestName.of(wish.monitor, wish.mode, 0.0, 0)
        stored = self._stored_names()
        surplus = []
        num_better = 0
        for name in self._present(like):
            if num_better >= wish.count:
                surplus.append(name.text)
            if name.text in stored:
                num_better += 1
        return tuple(surplus)

    def _named_steps(self) -> list[NamedStep]:
        """Return the snapshots of this run that have a name at the first level."""
        first_start = self._run.first_start
        return [named for named in self._client.state.names if named.key.start >= first_start]

    def _stored_names(self) -> set[str]:
        """Return the names whose snapshot is at every level that can still store it."""
        levels = self._client.state.levels
        stored = set()
        for named in self._named_steps():
            if all(named.key in level.complete or named.key in level.given_up for level in levels):
                stored.add(named.name)
        return stored


def _is_listed(state: KeeperState) -> bool:
    return bool(state.levels) and (state.levels[0].is_listed or state.levels[0].is_failing)
