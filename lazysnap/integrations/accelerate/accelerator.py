"""``LazyAccelerator``: an ``Accelerator`` whose ``save_state`` captures lazily and whose ``load_state`` restores it."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from lazysnap.engine import SnapshotEngine
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError
from lazysnap.integrations.accelerate.integration import AcceleratorIntegration, Snapshots
from lazysnap.integrations.arguments import check_path
from lazysnap.resolver import check_choice, means_snapshot
from lazysnap.restore.snapshot import Snapshot

_INTEGRATION = "_lazysnap_integration"
"""The attribute of an accelerator with its integration."""
_STOCK_KIND = "_lazysnap_stock_kind"
"""The attribute of a class from ``_with_snapshots`` with the class that it extends."""


class _WithSnapshots:
    """The methods of an accelerator that snapshots change."""

    if TYPE_CHECKING:
        _lazysnap_integration: AcceleratorIntegration
        project_configuration: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy as Accelerate's accelerator, with the same place for snapshots, but without the current
        training.
        """
        kind = type(self)
        state = {**vars(self), _INTEGRATION: self._lazysnap_integration.snapshots}
        stock_kind = vars(kind).get(_STOCK_KIND)
        if stock_kind is None:
            return kind.__new__, (kind,), state
        return _new_attached, (stock_kind,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lazysnap_integration = _integration_of(self, state[_INTEGRATION])

    @property
    def engine(self) -> SnapshotEngine:
        """The engine, for ``wait``, ``keep`` and other calls; made at the first use (then collective)."""
        return self._lazysnap_integration.opened().engine

    @property
    def run_id(self) -> str | None:
        """The id of the current run, the same after every restart.

        ``None`` before ``load_state("latest")`` or the first boundary. Give it to ``init_trackers`` (docs/loggers.md).
        Collective at the first call, which makes the engine.
        """
        return self.engine.run_id

    def statistics(self) -> Statistics | None:
        """Return counters and timings so far; ``None`` before anything was captured or loaded."""
        return self._lazysnap_integration.statistics()

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's; a model in DDP is captured in shares."""
        model = super().prepare_model(*args, **kwargs)  # type: ignore[misc]
        self._lazysnap_integration.add_model(model)
        return model

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's; the loader's position is part of the state."""
        loader = super().prepare_data_loader(*args, **kwargs)  # type: ignore[misc]
        self._lazysnap_integration.boundaries.watch_loader(loader)
        return loader

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's; steps of the optimizer are observed."""
        optimizer = super().prepare_optimizer(*args, **kwargs)  # type: ignore[misc]
        self._lazysnap_integration.boundaries.watch_optimizers(self._optimizers)  # type: ignore[attr-defined]
        return optimizer

    def save_state(
        self, output_dir: "str | os.PathLike[str] | None" = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Capture the state between two steps, lazily. Returns in milliseconds.

        Call it after everything that belongs to a step, or not at all: steps are captured anyway, every
        ``SnapshotConfig.every_n_steps``, before the next batch is fetched.

        With a directory, the directory names the snapshot for ``load_state``. When the snapshot is durable, a process
        puts Accelerate's files into the directory: see ``wait_for_checkpoints``. Accelerate itself writes the files,
        while training waits, in these cases: this step was already captured; the level is busy with another snapshot;
        during accumulation; with FSDP2; without a level; with further arguments.

        Collective: with a directory. Raises: as ``SnapshotEngine.boundary``, and as Accelerate if it writes the files.

        Args:
            output_dir: the directory; with ``automatic_checkpoint_naming`` Accelerate chooses it.
            safe_serialization: see Accelerate's.
            kwargs: further arguments of Accelerate's.

        Returns: the directory; without one the step that was captured, or ``None``.
        """
        integration = self._lazysnap_integration
        if output_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            return integration.boundary()
        directory = None
        if output_dir is not None:
            directory = os.path.expanduser(os.fspath(output_dir))
        stock = super().save_state  # type: ignore[misc]
        by_stock = functools.partial(stock, safe_serialization=safe_serialization, **kwargs)
        return integration.save(directory, by_stock, safe_serialization=safe_serialization, has_more=bool(kwargs))

    def wait_for_checkpoints(self, timeout_s: float = 3600.0) -> bool:
        """Block until every directory of ``save_state`` has Accelerate's files. The end of the program waits, too.

        Collective.

        Returns: ``False`` after the deadline, or if the files of a directory cannot be made.
        """
        return self._lazysnap_integration.wait_for_checkpoints(timeout_s)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Snapshot | None:
        """Restore a snapshot from memory or the fastest level that has it. One line on the console names the source.

        Prepared loaders continue in mid-epoch; ``skip_first_batches`` does not skip twice.

        Blocks. Collective. Raises: as ``SnapshotEngine.restore``, and as Accelerate if it loads its files.

        Args:
            input_dir: ``"latest"``, a step or ``"run:1f3a"``; or a directory, for the snapshot that it names. If
                that snapshot no longer exists, Accelerate loads the files of the directory. ``None``, with
                ``automatic_checkpoint_naming``: the newest directory that has a snapshot or files.
            args: further arguments of Accelerate's.
            kwargs: further arguments of Accelerate's.

        Returns: the snapshot (its ``step``, ``level`` and ``seconds``); ``None`` if there is none, or if Accelerate
            loaded its files.
        """
        integration = self._lazysnap_integration
        if input_dir is not None and not isinstance(input_dir, os.PathLike):
            check_choice(input_dir)
        if isinstance(input_dir, int) or means_snapshot(input_dir):
            return integration.load(input_dir)
        check_path(input_dir, "Accelerate", 'load_state("latest")', "--to DIRECTORY --format accelerate")
        directory = None
        if input_dir is not None:
            directory = os.path.expanduser(os.fspath(input_dir))
        stock = super().load_state  # type: ignore[misc]

        def load_by_stock(place: str | None) -> None:
            stock(place, *args, **kwargs)

        return integration.load_directory(directory, load_by_stock)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Like Accelerate's; a loader that was restored in mid-epoch continues without skipping twice."""
        position = self._lazysnap_integration.boundaries.position_of(dataloader)
        if position is None:
            return super().skip_first_batches(dataloader, num_batches)  # type: ignore[misc]
        position.skip(num_batches)
        return dataloader

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Like Accelerate's; if processes have different numbers of batches, nothing is captured within it, and its end
        is collective.
        """
        is_even = even_batches
        if is_even is None:
            is_even = self.even_batches  # type: ignore[attr-defined]
        with contextlib.ExitStack() as stack:
            if self.multi_device and not is_even:  # type: ignore[attr-defined]
                stack.enter_context(self._lazysnap_integration.uneven_steps())
            stack.enter_context(super().join_uneven_inputs(joinables, even_batches))  # type: ignore[misc]
            yield

    def rollback(self, steps: int = 1) -> None:
        """Restore, in this process, the newest snapshot at least ``steps`` older than the current step.

        Call it on all ranks, after ``backward`` or the optimizer's step. The state is restored before the next batch is
        fetched, and the loop continues with that batch. Micro batches of an accumulation are dropped.

        Raises: ConfigError. The fetch of the next batch raises SnapshotNotFound, if there is no such snapshot, or
        WaitTimeout.
        """
        self._lazysnap_integration.rollback(steps)

    def log(self, values: dict[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Like Accelerate's; trackers also get metrics of snapshots, under ``lazysnap/…``: see ``logged_figures``."""
        super().log({**values, **self._lazysnap_integration.figures()}, step, *args, **kwargs)  # type: ignore[misc]

    def free_memory(self, *objects: Any) -> Any:
        """Like Accelerate's; first ends the training as ``end_training``."""
        self._lazysnap_integration.close()
        self._lazysnap_integration.forget()
        return super().free_memory(*objects)  # type: ignore[misc]

    def end_training(self) -> None:
        """Like Accelerate's; before it, the last snapshot becomes durable and its memory is freed.

        Blocks: at most ``drain_timeout_s``. Collective. Without this call the same happens at exit.
        """
        self._lazysnap_integration.close()
        super().end_training()  # type: ignore[misc]


class LazyAccelerator(_WithSnapshots, Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` with snapshots, after changing one import::

        accelerator = LazyAccelerator(project_dir="runs/a")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.load_state("latest")

    Args:
        snapshots: a path or URL, or a ``SnapshotConfig``; by default ``<project_dir>/lazysnap``, else in the
            logging directory, else ``./lazysnap``, which a line on the console names.

    All other arguments are Accelerate's. Raises: ConfigError, for DeepSpeed, FSDP 1, XLA and Megatron-LM.
    """

    def __init__(self, *args: Any, snapshots: Snapshots = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazysnap_integration = AcceleratorIntegration(self, snapshots)


def attach_accelerator(accelerator: Any, snapshots: Snapshots = None) -> Any:
    """Add the methods of a ``LazyAccelerator`` to an existing accelerator, in place, and return it.

    Objects that it has already prepared are captured, too. Raises: as ``LazyAccelerator``; ConfigError, if it has them
    already, with another place or other settings.
    """
    integration = vars(accelerator).get(_INTEGRATION)
    if integration is None:
        integration = _integration_of(accelerator, snapshots)
        accelerator.__class__ = _with_snapshots(type(accelerator))  # type: ignore[arg-type]
        accelerator._lazysnap_integration = integration
    elif snapshots is not None and not integration.has_settings(snapshots):
        raise ConfigError(
            f"attach: this accelerator has snapshots already, with {integration.snapshots!r}, and cannot get "
            f"{snapshots!r}: call attach once"
        )
    return accelerator


def _integration_of(accelerator: Any, snapshots: Snapshots) -> AcceleratorIntegration:
    """Return an integration for an accelerator that has already prepared objects. Raises: as ``LazyAccelerator``."""
    integration = AcceleratorIntegration(accelerator, snapshots)
    for loader in accelerator._dataloaders:
        integration.boundaries.watch_loader(loader)
    integration.boundaries.watch_optimizers(accelerator._optimizers)
    return integration


def _new_attached(stock_kind: Any) -> Any:
    """Return an accelerator for the pickle of an attached one, without calling its constructor."""
    kind: Any = _with_snapshots(stock_kind)
    return kind.__new__(kind)


@functools.cache
def _with_snapshots(stock_kind: type[Any]) -> type:
    """Return a subclass of an accelerator's class that has the methods of ``_WithSnapshots``."""
    members = {"__module__": stock_kind.__module__, _STOCK_KIND: stock_kind}
    return type(stock_kind.__name__, (_WithSnapshots, stock_kind), members)
