"""The run that an engine trains: the resumed snapshot, its beginning, and what stays in memory."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lazysnap import faults
from lazysnap.config import STORE_EVERY_S, PersistentLevel
from lazysnap.core.messages import JobSettings, LevelSettings, StepKey
from lazysnap.data.position import position_in
from lazysnap.engine import report
from lazysnap.engine.level_checks import shared_levels
from lazysnap.engine.messages import MessageKind
from lazysnap.engine.preemption import RankCaptures
from lazysnap.engine.recorder import Recorder
from lazysnap.errors import JobBusy, KeeperError, SnapshotNotFound
from lazysnap.keeper.memory_inventory import MemoryEntry
from lazysnap.memory.slots import TrainerSlot
from lazysnap.ranks.checks import together
from lazysnap.resolver import SnapshotKey
from lazysnap.restore.level import whole_snapshots
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.restart import fetch, reseed
from lazysnap.restore.search import Restart
from lazysnap.restore.snapshot import Absence, Snapshot
from lazysnap.state.optimizers import check_optimizers

logger = logging.getLogger(__name__)


class Lineage:
    """The snapshots that led to the current state: by run, the last step of it, oldest run first."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def continue_from(self, present: str, run_id: str, step: int) -> None:
        """Record that training continues from ``step`` of ``run_id``; ``present`` is the run so far."""
        if run_id not in (present, *self._steps):
            self._steps.clear()  # a restart from elsewhere
        runs = list(self._steps)
        if run_id in runs:
            for run_after in runs[runs.index(run_id) :]:
                del self._steps[run_after]
        self._steps[run_id] = step

    def has(self, run_id: str, step: int, *, present: str) -> bool:
        """True if a snapshot is of the current run, or of one that led to it."""
        return run_id == present or step <= self._steps.get(run_id, -1)


class Run:
    """The run of an engine. NEW -> BEGUN (``is_begun``): captures belong to this run. A later ``load`` may change the
    run.
    """

    def __init__(self, restart: Restart, recorder: Recorder) -> None:
        """Create a run in state NEW. Collective with several nodes. Blocks: tries levels.

        Args:
            restart: the settings, the state and everything else that a restart needs.
            recorder: captures the steps of this run.

        Raises: WaitTimeout.
        """
        self.restart = restart
        self.recorder = recorder
        self.meta = recorder.meta
        self.client = recorder.memory.client
        self._messages = recorder.messages
        self._shared = shared_levels(restart.world, restart.config.levels)
        """URLs of the levels that all nodes share."""
        self.lineage = Lineage()
        self.first_start = 0
        """The start that began this run, if this process began it: names of earlier starts belong to another run."""
        self.is_begun = False
        """True once the run id is decided, so that captures may begin."""
        self.resumed: report.Resumed | None = None
        self._absence: Absence | None = None
        self.start_reported = False
        """True after the line about the start of this training was printed."""

    @property
    def run_id(self) -> str | None:
        """See ``SnapshotEngine.run_id``."""
        if not (self.is_begun or self.start_reported):
            return None
        return self.meta.run_id

    def rename(self, run_id: str) -> None:
        """Set the run id of a training that resumes nothing to that of rank 0; an empty text keeps its own. Call it
        before ``fetch``. Collective. Blocks: for other ranks.
        """
        id_of_first_rank = self.restart.world.exchange("naming the run", run_id)[0]
        if id_of_first_rank:
            self.meta.rename(id_of_first_rank)

    # ---------------------------------------------------------------- restart

    def fetch(self, which: int | str, restart: Restart | None = None) -> Snapshot | None:
        """See ``SnapshotEngine._fetch``. Collective. Blocks."""
        snapshot = fetch(which, restart or self.restart)
        if isinstance(snapshot, Absence):
            self._absence = snapshot
            if snapshot.newest_run is not None and not self.is_begun:
                self.meta.begin_after(snapshot.newest_run)
            return None
        return snapshot

    def steps(self) -> list[int]:
        """See ``SnapshotEngine.all_steps``. Blocks."""
        restart = self.restart
        place = restart.world.place
        memory = NodeMemory(self.client, restart.identity, place, restart.config.io_timeout_s, logger.info)
        steps: dict[str, set[int]] = defaultdict(set)
        """Return the steps of each run."""
        try:
            for inventory in memory.inventories():
                for entry in inventory.entries:
                    steps[entry.run_id].add(entry.step)
        finally:
            memory.close()
        for name in whole_snapshots(restart.config.levels, partial(logger.info, "all_steps(): %s")):
            steps[name.run_id].add(name.step)
        run_id = self.run_id or max(steps, default="")
        return sorted(steps[run_id])

    def fetch_to_read(self, which: int | str) -> Snapshot:
        """See ``SnapshotEngine._fetch_to_read``. Collective. Blocks."""
        restart = replace(self.restart, casts=True)
        try:
            snapshot = self.fetch(which, restart)
        except JobBusy:
            logger.info("the training runs: reading its newest snapshot on storage")
            snapshot = self.fetch(which, replace(restart, client=None))
        if snapshot is None:
            where = report.places(level.url for level in self.restart.config.levels)
            raise SnapshotNotFound(
                f"{which!r}: there is no whole snapshot {where}; train first, or give the path of a checkpoint"
            )
        return snapshot

    def restore(self, which: int | str) -> Snapshot | None:
        """See ``SnapshotEngine.restore``. Collective. Blocks."""
        snapshot = self.fetch(which)
        if snapshot is None:
            self.tell_start()
        else:
            self.load(snapshot, position=position_in(snapshot.state))
        return snapshot

    def load(self, snapshot: Snapshot, *, position: str = "") -> None:
        """See ``SnapshotEngine._load``. Collective. Blocks."""
        source = self.restart.source
        world = self.restart.world
        started = time.perf_counter()
        work = "checking the optimizers"
        together(world, work, partial(check_optimizers, source, snapshot.state, snapshot.parameters))
        faults.point("restore.load")
        together(world, "loading", partial(source.load, snapshot.state))
        faults.point("restore.loaded")
        if snapshot.world_size != world.size:
            position = ""  # its counts are for the old number of ranks
            reseed(snapshot, world)
        self._resume(snapshot, position, snapshot.seconds + time.perf_counter() - started)

    def _resume(self, snapshot: Snapshot, position: str, seconds: float) -> None:
        """Continue the run of a loaded snapshot, or begin a new run, and print that.

        Blocks: asks the keeper.
        """
        self.continue_from(snapshot, (snapshot.new_run or snapshot).run_id)
        if snapshot.world_size > 1 or not self.restart.world.is_alone:
            self._discard_others(snapshot)
        self.begin(snapshot.step, report.source_of(snapshot))
        self.start_reported = False
        self.tell_start(report.resumed(snapshot, time.time_ns(), position, seconds))
        if snapshot.new_run is not None:
            self._messages.tell(
                MessageKind.NEW_RUN,
                step=snapshot.step,
                run=snapshot.run,
                new=snapshot.new_run.name,
                newest=snapshot.new_run.newest.step,
                left=snapshot.new_run.newest_run_name,
            )

    def continue_from(self, snapshot: Snapshot, run_id: str) -> None:
        """Let later captures belong to that run, which continues after ``snapshot``."""
        self.lineage.continue_from(self.meta.run_id, snapshot.run_id, snapshot.step)
        if run_id != self.meta.run_id:
            self.first_start = 0
        self.meta.run_id = run_id
        self.meta.follow(snapshot.newest_start)
        if run_id != snapshot.run_id:
            self.first_start = self.meta.start_number
        self.recorder.resume(snapshot)
        self.resumed = report.Resumed.of(snapshot, has_levels=bool(self.restart.config.levels))

    def tell_start(self, line: str | None = None) -> None:
        """Print, once, how this training starts: ``line``, or that it starts fresh, and why.

        The first of ``restore``, ``load``, ``prepare`` and ``boundary`` calls it.
        """
        if not self.start_reported:
            self.start_reported = True
            self._messages.tell(MessageKind.START, line=line or report.fresh(self._absence))

    # ---------------------------------------------------------------- beginning

    def begin(self, step: int = -1, source: str = "") -> None:
        """Let captures belong to this run from now on. Does not block.

        Args:
            step: the step from which training continues; -1 at the beginning.
            source: the source from which that step was restored.
        """
        self.is_begun = True
        start = self.meta.start_number
        self.recorder.memory.events.begin(start)
        self.client.begin_start(self._job_settings(), start, step, source)

    def _job_settings(self) -> JobSettings:
        """Return what all ranks of a node agree on for one start."""
        config = self.restart.config
        world = self.restart.world
        nodes = list(dict.fromkeys(world.nodes))  # sorted by first rank, so rank 0 is on node 0
        levels = []
        for level in config.levels:
            is_shared = len(nodes) == 1 or level.url in self._shared
            levels.append(_level_settings(level, is_shared=is_shared))
        return JobSettings(
            run=self.meta.run_id,
            levels=tuple(levels),
            redundancy=self.restart.discovery.redundancy,
            capture_every_n_steps=config.every_n_steps,
            num_kept=self.recorder.memory.kept,
            ranks=tuple(world.node_ranks),
            world_size=world.size,
            node=nodes.index(world.place.node),
            num_nodes=len(nodes),
        )

    def begin_once(self) -> None:
        """Print how this training starts, and call ``begin``, unless already done: a second ``begin`` would make the
        client forget which steps are durable.
        """
        self.tell_start()
        if not self.is_begun:
            self.begin()

    def begin_again_if_earlier(self, step: int) -> None:
        """Begin another start if a loop continued at a lower ``step``."""
        last = self.recorder.seen_step or 0
        if step >= last:
            return
        self._messages.tell(MessageKind.BEGINS_AGAIN, step=step, last=last)
        self.recorder.begin_again()
        self.meta.follow(None)
        self.resumed = None  # the resumed snapshot does not lead to these
        self.begin(max(0, step - 1))

    # ---------------------------------------------------------------- what there is of it

    def captures(self) -> RankCaptures:
        """Return the captures so far, for preemption. Does not block. Thread-safe."""
        resumed = self.resumed
        steps = self.recorder.captures.whole_steps()
        seen_step = self.recorder.seen_step or 0
        if not steps and resumed is not None and resumed.only_in_memory:
            return RankCaptures((resumed.newest_step,), self.newest_durable(), seen_step, is_resumed=True)
        return RankCaptures(tuple(steps), self.newest_durable(), seen_step)

    def newest_durable(self) -> tuple[int, str] | None:
        """Return the newest step of this training that any level has, as far as this process knows, and its URL."""
        resumed = self.resumed
        newest: tuple[int, str] | None = None
        if resumed is not None and resumed.durable_at is not None:
            newest = (resumed.newest_step, resumed.durable_at)
        for index, level in enumerate(self.restart.config.levels):
            step = self.client.newest_complete(index)
            if step < 0 and resumed is not None and self.is_stored(resumed, index):
                step = resumed.newest_step
            if step >= 0 and (newest is None or step > newest[0]):
                newest = (step, level.url)
        return newest

    def is_stored(self, resumed: report.Resumed, index: int) -> bool:
        """True if a level has the resumed snapshot, which at the restart may have been in memory only."""
        levels = self.client.state.levels
        return index < len(levels) and StepKey(resumed.start, resumed.newest_step) in levels[index].complete

    # ---------------------------------------------------------------- memory

    def _discard_others(self, snapshot: Snapshot) -> None:
        """Drop captures in memory: other ranks may lack them.

        These stay: the restored snapshot, the newest one that all ranks have, and older ones of which a node holds
        parity. One of these is protected until keepers protect a newer one.
        """
        restored = SnapshotKey(snapshot.run_id, snapshot.step, snapshot.start, snapshot.world_size)
        newest = restored
        if snapshot.new_run is not None:
            newest = snapshot.new_run.newest
        elif snapshot.repeats is not None:
            newest = snapshot.repeats
        kept = set()
        for key in (restored, newest, *snapshot.protected):
            if key <= newest:
                kept.add((key.run_id, key.step, key.start))
        self.drop("restore.discard", lambda entry: (entry.run_id, entry.step, entry.start) not in kept)

    def drop(self, point: str, is_unwanted: Callable[[MemoryEntry], bool]) -> None:
        """Drop captures in memory. ``point``: fault point before each. Blocks: asks the keeper."""
        try:
            entries = self.client.memory(self.restart.config.io_timeout_s).entries
        except KeeperError as error:
            logger.info("nothing in memory to go through: %s", error)
            return
        for entry in filter(is_unwanted, entries):
            faults.point(point)
            if isinstance(entry.slot, TrainerSlot):  # a slot of this rank
                entry.slot.discard(entry.sequence)


def _level_settings(level: PersistentLevel, *, is_shared: bool) -> LevelSettings:
    period_s = level.period_s
    if period_s is None:
        period_s = STORE_EVERY_S  # unused: the level stores by steps
    storage_options = None
    if level.storage_options is not None:
        storage_options = dict(level.storage_options)
    return LevelSettings(
        url=level.url,
        every_s=period_s,
        every_n_steps=level.every_n_steps,
        keep_last=level.keep_last,
        keep_every_n_steps=level.keep_every_n_steps,
        timeout_s=level.timeout_s,
        is_shared=is_shared,
        max_bytes_per_s=level.max_bytes_per_s,
        storage_options=storage_options,
    )
