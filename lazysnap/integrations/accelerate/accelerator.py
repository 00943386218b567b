"""``LazyAccelerator``: an ``Accelerator`` whose ``save_state`` is a lazy capture and whose ``load_state`` finds it."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from lazysnap.engine import SnapshotEngine
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError
from lazysnap.integrations.accelerate.door import Door, Snapshots
from lazysnap.integrations.arguments import check_path
from lazysnap.restore.snapshot import Snapshot
from lazysnap.runs import check_choice, means_snapshot

_DOOR = "_lazysnap_door"
_STOCK_KIND = "_lazysnap_stock_kind"


class _WithSnapshots:
    """The methods of an accelerator that are other ones with snapshots."""

    if TYPE_CHECKING:
        _lazysnap_door: Door
        project_configuration: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, or copy, as Accelerate's, and with the same snapshots; the training that runs is not part of it."""
        kind = type(self)
        stock_kind = vars(kind).get(_STOCK_KIND)
        made = (_attached_to, (stock_kind,)) if stock_kind is not None else (kind.__new__, (kind,))
        return *made, {**vars(self), _DOOR: self._lazysnap_door.made_with}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lazysnap_door = _door_of(self, state[_DOOR])

    @property
    def engine(self) -> SnapshotEngine:
        """The engine, for ``wait``, ``keep`` and the like; made when it is first used (collective then)."""
        return self._lazysnap_door.opened().engine

    @property
    def run_id(self) -> str | None:
        """The id of the run that trains, the same after every restart of the run: give it to ``init_trackers``
        (docs/loggers.md). ``None`` before ``load_state("latest")`` or the first boundary. Collective then, on all
        ranks: it makes the engine.
        """
        return self.engine.run_id

    def statistics(self) -> Statistics | None:
        """Counters and timings so far; ``None`` before anything was captured or loaded."""
        return self._lazysnap_door.statistics()

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's; a model in DDP is captured in shares."""
        model = super().prepare_model(*args, **kwargs)  # type: ignore[misc]
        self._lazysnap_door.note_model(model)
        return model

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's; the loader's position is part of the state."""
        loader = super().prepare_data_loader(*args, **kwargs)  # type: ignore[misc]
        self._lazysnap_door.watch_loader(loader)
        return loader

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's; the optimizer's steps are noticed."""
        optimizer = super().prepare_optimizer(*args, **kwargs)  # type: ignore[misc]
        self._lazysnap_door.watch_optimizers()
        return optimizer

    def save_state(
        self, output_dir: "str | os.PathLike[str] | None" = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Mark the boundary between two steps, without a directory. Captures lazily and returns in milliseconds; the
        step that it captured, or ``None``. With a directory, or with ``automatic_checkpoint_naming``: the same, and the
        directory, which is returned, names that snapshot for ``load_state``. When the snapshot is durable, a process
        puts Accelerate's files into the directory: see ``wait_for_checkpoints``.

        Call it behind everything that belongs to a step, or not at all: steps are captured anyway, every
        ``SnapshotConfig.every_n_steps``, before the next batch is fetched. With a directory Accelerate itself writes,
        while training waits, where this step was captured before, while the level is busy with another snapshot, within
        an accumulation, with FSDP2, without a level, and with further arguments.
        With a directory collective. Raises: as ``SnapshotEngine.boundary``; what stock raises, where that writes it.
        """
        door = self._lazysnap_door
        is_named = self.project_configuration.automatic_checkpoint_naming
        stock = super().save_state  # type: ignore[misc]
        if door.is_stock:
            return stock(output_dir, safe_serialization, **kwargs)
        if output_dir is None and not is_named:
            return door.boundary()
        directory = None if output_dir is None else os.path.expanduser(os.fspath(output_dir))
        by_stock = functools.partial(stock, safe_serialization=safe_serialization, **kwargs)
        return door.save(directory, by_stock, safe_serialization=safe_serialization, has_more=bool(kwargs))

    def wait_for_checkpoints(self, timeout_s: float = 3600.0) -> bool:
        """Block until every directory that ``save_state`` was asked for has Accelerate's files; ``False`` after the
        deadline, or if one cannot be made. The end of the program waits, too. Collective.
        """
        return self._lazysnap_door.wait_for_checkpoints(timeout_s)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Snapshot | None:
        """``"latest"``, a step or ``"run:1f3a"``: restore the snapshot, from the freshest place that has it, and return
        it (its ``step``, ``level`` and ``seconds``), or ``None`` if there is none; one line names it.

        Prepared loaders go on in mid-epoch by themselves; ``skip_first_batches`` does not skip twice.
        A directory: the snapshot that it names, likewise; if there is none any more, Accelerate loads its files, and
        ``None`` is returned. ``None``, with ``automatic_checkpoint_naming``: the newest directory that has either.
        Blocks. Collective. Raises: as ``SnapshotEngine.restore``; what stock raises, where that loads.
        """
        door = self._lazysnap_door
        if input_dir is not None and not isinstance(input_dir, os.PathLike):
            check_choice(input_dir)
        is_ours = isinstance(input_dir, int) or means_snapshot(input_dir)
        if is_ours and not door.is_stock:
            return door.load(input_dir)
        if is_ours:
            raise ConfigError(f"load_state({input_dir!r}): there are no snapshots with {self!r}; name a directory")
        stock = super().load_state  # type: ignore[misc]
        if door.is_stock:
            stock(input_dir, *args, **kwargs)
            return None
        check_path(input_dir, "Accelerate", 'load_state("latest")', "--to DIRECTORY --format accelerate")
        directory = None if input_dir is None else os.path.expanduser(os.fspath(input_dir))
        return door.load_directory(directory, lambda place: stock(place, *args, **kwargs))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Like Accelerate's; a loader that was restored in mid-epoch goes on where it was, and skips nothing twice."""
        position = self._lazysnap_door.boundaries.position_of(dataloader)
        if position is None:
            return super().skip_first_batches(dataloader, num_batches)  # type: ignore[misc]
        position.skip(num_batches)
        return dataloader

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Like Accelerate's; where processes then have different numbers of batches, nothing is captured within it.

        Collective at its end then.
        """
        with contextlib.ExitStack() as stack:
            if self.multi_device and not (self.even_batches if even_batches is None else even_batches):  # type: ignore[attr-defined]
                stack.enter_context(self._lazysnap_door.apart())
            stack.enter_context(super().join_uneven_inputs(joinables, even_batches))  # type: ignore[misc]
            yield

    def rollback(self, steps: int = 1) -> None:
        """Go back in place to the newest snapshot at least ``steps`` older than the running step.

        Call it on all ranks, behind ``backward`` or the optimizer's step. The state goes back before the next batch is
        fetched, and the loop goes on with that batch; micro batches of an accumulation are dropped.
        Fetching that batch raises SnapshotNotFound if there is no such snapshot, and WaitTimeout.
        Raises: ConfigError.
        """
        self._lazysnap_door.rollback(steps)

    def log(self, values: dict[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Like Accelerate's; trackers get what snapshots cost as well, under ``lazysnap/…``: see ``Figures.values``."""
        super().log({**values, **self._lazysnap_door.figures()}, step, *args, **kwargs)  # type: ignore[misc]

    def free_memory(self, *objects: Any) -> Any:
        """Like Accelerate's; the training ends before, as in ``end_training``."""
        self._lazysnap_door.close()
        self._lazysnap_door.forget()
        return super().free_memory(*objects)  # type: ignore[misc]

    def end_training(self) -> None:
        """Like Accelerate's; before it, the last snapshot becomes durable and its memory is freed.

        Blocks: at most ``drain_timeout_s``. Collective. A program that ends without it does the same at its exit.
        """
        self._lazysnap_door.close()
        super().end_training()  # type: ignore[misc]


class LazyAccelerator(_WithSnapshots, Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` with snapshots: one changed import.

    ``snapshots``: a path or URL, or a ``SnapshotConfig``; default ``<project_dir>/lazysnap``, else in the logging
    directory, or beside the first one that ``save_state`` names, else ``./lazysnap``; one line says so then.
    All else is Accelerate's. Raises: ConfigError, for DeepSpeed and FSDP 1.
    """

    def __init__(self, *args: Any, snapshots: Snapshots = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazysnap_door = Door(self, snapshots)


def attach_accelerator(accelerator: Any, snapshots: Snapshots = None) -> Any:
    """Give ``accelerator``, which somebody else made, what a ``LazyAccelerator`` has, in place; returns it.

    What it has prepared by now counts, too. Idempotent. Raises: as ``LazyAccelerator``.
    """
    if _DOOR not in vars(accelerator):
        door = _door_of(accelerator, snapshots)
        accelerator.__class__ = _with_snapshots(type(accelerator))  # type: ignore[arg-type]
        accelerator._lazysnap_door = door
    return accelerator


def _door_of(accelerator: Any, snapshots: Snapshots) -> Door:
    """Return the engine's side of an accelerator that has prepared objects by now. Raises: as ``LazyAccelerator``."""
    door = Door(accelerator, snapshots)
    for loader in accelerator._dataloaders:
        door.watch_loader(loader)
    door.watch_optimizers()
    return door


def _attached_to(kind: Any) -> Any:
    """An accelerator of ``kind`` that is attached, and empty yet."""
    made: Any = _with_snapshots(kind)
    return made.__new__(made)


@functools.cache
def _with_snapshots(kind: type[Any]) -> type:
    return type(kind.__name__, (_WithSnapshots, kind), {"__module__": kind.__module__, _STOCK_KIND: kind})
