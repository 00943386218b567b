"""The whole state of a Lightning fit at a step boundary, and a restart that continues exactly from it.

The boundary is just before the next batch is fetched. Step k is then complete: learning rates, averaged weights,
ModelCheckpoint, validation, counters, loggers; step k+1 has not begun. Lightning restores the part that its own
checkpoint has. The rest is restored when the restarted fit reaches the same boundary, and so are the counters, which
Lightning changes for its own kind of restart.

Not in a snapshot: attributes of modules and callbacks that no ``state_dict`` or ``on_save_checkpoint`` gives; the
schedule that StochasticWeightAveraging swaps in; masks that ModelPruning omits from its checkpoints on purpose.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from lazysnap.data.streams import RandomStreams
from lazysnap.errors import StateError
from lazysnap.integrations.lightning.extras import (
    ModuleExtras,
    collect_callbacks,
    collect_metrics,
    key_of,
    restore_callbacks,
    restore_metrics,
)
from lazysnap.integrations.lightning.framework import neighbour, overrides
from lazysnap.integrations.lightning.loaders import LoaderPositions, running_workers, start_workers
from lazysnap.integrations.lightning.loops import (
    collect_loops,
    is_between_epochs,
    reason_of_end,
    recount,
    restore_loops,
)
from lazysnap.integrations.lightning.rollback import with_present_data
from lazysnap.integrations.lightning.strategies import state_of_rank
from lazysnap.shard.manifest import EXTRAS
from lazysnap.state.codec import path_text
from lazysnap.state.modules import check_loads, load_module, reordered_tensors, warn_of_reordered
from lazysnap.state.optimizers import check_memory_orders, classes_of, put_back
from lazysnap.state.scalars import pack, plain_numbers, unpack
from lazysnap.state.skipped import Path, SkippedValues, with_values_of
from lazysnap.state.source import OPTIMIZERS, StateSource
from lazysnap.state.wrappers import stepping

logger = logging.getLogger(__name__)

_LIGHTNING_KEYS = frozenset(
    ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers")
)
"""Keys that Lightning itself writes into a checkpoint; all others belong to the program or its callbacks."""
_MAX_PATHS = 8
"""Maximum paths in one warning."""
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_LEFT_OUT = "left_out"
"""The key below ``EXTRAS`` for paths of the program's values that the snapshot skips."""


class _Ours(dict[str, Any]):
    """A checkpoint that is the part of a snapshot which Lightning's connector restores."""


class LightningState(StateSource):
    """The ``StateSource`` of one fit (or of one evaluation, for ``expected`` only).

    It has many methods: the interface, and one for each point of a fit at which parts of the state are restored.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._streams = RandomStreams()
        self.loaders = LoaderPositions()
        self._extras: dict[str, ModuleExtras] = {}
        self._resumed: dict[str, Any] | None = None
        """The part of a restored state that waits for its step boundary."""
        self._is_finished = False
        """True if the restored fit is finished."""
        self._reported_paths: set[Path] = set()
        """Paths that a warning has named."""

    # ---------------------------------------------------------------- StateSource

    def collect(self) -> dict[str, Any]:
        """See ``StateSource.collect``. Calls the hooks for checkpoints of the program."""
        trainer = self._trainer
        with state_of_rank(trainer):
            state: dict[str, Any] = dict(self._connector.dump_checkpoint(False))
        for name, value in state.items():
            if isinstance(value, dict) and name.endswith(("state_dict", "model_state")):
                state[name] = dict(value)
        state["callbacks"] = pack(self._by_name(state.get("callbacks", {})))
        left_out = self._leave_out(state)
        position = None
        if not is_between_epochs(trainer):
            trained = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            position = {"trained": trained, "loaders": self.loaders.state_dict()}
        state[EXTRAS] = {
            "loops": collect_loops(trainer),
            "position": position,
            "world_size": trainer.world_size,
            "metrics": collect_metrics(trainer, trainer.lightning_module),
            "callbacks": collect_callbacks(trainer),
            "modules": {},
            "validation_workers": running_workers(self._validation_loaders()),
            "streams": self._streams.collect(),
            OPTIMIZERS: classes_of(self),
        }
        for name, extras in self._extras.items():
            state[EXTRAS]["modules"][name] = extras.collect()
        if left_out:
            state[EXTRAS][_LEFT_OUT] = left_out
        return state

    def _by_name(self, callbacks: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the states of callbacks by ``key_of`` instead of ``state_key``."""
        names = {callback.state_key: key_of(callback) for callback in self._trainer.callbacks}
        return _renamed(callbacks, names)

    def _leave_out(self, state: dict[str, Any]) -> list[list[Any]]:
        """Remove values of unknown types that the program added to ``state``, and return their paths.

        A warning names each path once. Hyperparameters become plain values if possible.
        """
        plugin = type(self._trainer.precision_plugin).__qualname__
        program_names = [name for name in state if name not in _LIGHTNING_KEYS and name != plugin]
        left_out = SkippedValues(plain_below=_HPARAMS)
        state |= left_out.without({name: state.pop(name) for name in program_names})
        new_paths = []
        for path, kind in left_out.kinds.items():
            if path not in self._reported_paths:
                self._reported_paths.add(path)
                new_paths.append(f"{path_text(path)} ({kind})")
        if new_paths and self._trainer.is_global_zero:
            if len(new_paths) > _MAX_PATHS:
                new_paths[_MAX_PATHS:] = [f"and {len(new_paths) - _MAX_PATHS} more"]
            logger.warning(
                "values of types that a snapshot cannot hold are left out of every snapshot (hyperparameters: stored "
                "as plain values, where they have such): %s. A restart takes what the program has there at that time, "
                "which is exact for values that training does not change; for others call "
                "lazysnap.register_type(cls, name=..., encode=..., decode=...) before the training",
                ", ".join(new_paths),
            )
        return [list(path) for path in left_out.kinds]

    def _with_live_values(self, checkpoint: dict[str, Any], paths: list[list[Any]]) -> dict[str, Any]:
        """Return ``checkpoint`` with the program's current values at ``paths``, which are not in the snapshot."""
        live: dict[str, Any] = {}
        reason = "its hooks give no value there now"
        try:
            with state_of_rank(self._trainer):
                live = dict(self._connector.dump_checkpoint(False))
            live["callbacks"] = self._by_name(live.get("callbacks", {}))
        except Exception as error:  # noqa: BLE001  hooks of the program, which may need a training that runs
            reason = f"its hooks for checkpoints raised {type(error).__name__}: {error}"
        checkpoint, missing = with_values_of(live, checkpoint, paths)
        if missing and self._trainer.is_global_zero:
            logger.warning(
                "values that were left out of the snapshot could not be taken from the program, since %s: %s",
                reason,
                ", ".join(map(path_text, missing)),
            )
        return checkpoint

    def named(self) -> Mapping[str, Any]:
        """See ``StateSource.named``: the model as wrapped by its strategy, without averages; its optimizers."""
        strategy = self._trainer.strategy
        objects = {"state_dict": strategy.model}
        for number, optimizer in enumerate(strategy.optimizers):
            objects[f"optimizer_states.{number}"] = optimizer
        return objects

    def lazy_tensors(self) -> Iterable[torch.Tensor]:
        """See ``StateSource.lazy_tensors``: the parameters of averaged models, which change at the end of a batch."""
        for average in self.averages().values():
            yield from average.parameters()

    def expected(self) -> Mapping[str, torch.Tensor]:
        """See ``StateSource.expected``. Empty if the program itself decides the content of a checkpoint."""
        module = self._trainer.lightning_module
        hooks = ("on_save_checkpoint", "on_load_checkpoint")
        decides = all(overrides(module, hook) for hook in hooks)
        if not module.strict_loading or decides:
            return {}
        tensors = {}
        for name, value in module.state_dict().items():
            if torch.is_tensor(value):
                tensors[f"state_dict.{name}"] = value
        return tensors

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """See ``StateSource.load``.

        At a restart, after ``accept``: load the parts that the connector did not restore yet, except those that wait
        for ``finish_resume``. In a rollback, at the end of a batch: load everything except the data.

        Calls the ``on_load_checkpoint`` hooks of the program. Raises: as these and ``load_state_dict``.
        """
        if self.is_resuming:
            self._load_training(state)
            return
        with state_of_rank(self._trainer):
            state = with_present_data(self._trainer, list(self.optimizers()), state)
        late_part = _late_part(state)
        self._give_to_connector(state)
        try:
            self._connector.restore_model()
            self._connector.restore_callbacks()
            self._load_training(self._connector._loaded_checkpoint)
        finally:
            self._connector._loaded_checkpoint = {}
        self._put_back(late_part, in_hook=True)
        self._streams.restore(late_part["streams"])

    def _give_to_connector(self, state: dict[str, Any]) -> None:
        """Let the connector load its part of a collected state."""
        checkpoint = dict(state)
        extra = checkpoint.pop(EXTRAS)
        checkpoint["callbacks"] = unpack(checkpoint["callbacks"])
        left_out = extra.get(_LEFT_OUT)
        if left_out:
            checkpoint = self._with_live_values(checkpoint, left_out)
        plugin = type(self._trainer.precision_plugin).__qualname__
        scaler = checkpoint.get(plugin)
        if isinstance(scaler, dict):
            checkpoint[plugin] = plain_numbers(scaler)
        keys = {key_of(callback): callback.state_key for callback in self._trainer.callbacks}
        checkpoint["callbacks"] = _renamed(checkpoint["callbacks"], keys)
        self._connector._loaded_checkpoint = _Ours(checkpoint)

    @property
    def is_loading(self) -> bool:
        """True if the connector is restoring a snapshot, and not a file."""
        return isinstance(self._connector._loaded_checkpoint, _Ours)

    def load_model(self, original: Callable[..., None], checkpoint: Any, *, strict: bool = True) -> None:
        """Replace the strategy's method: a sharded strategy would expect to have read its own files."""
        if not self.is_loading:
            original(checkpoint, strict=strict)
            return
        module = self._trainer.lightning_module
        load_module(module, checkpoint["state_dict"], strict=strict)

    def _load_training(self, state: Mapping[str, Any]) -> None:
        self._connector.restore_precision_plugin_state()
        self._connector.restore_loops()
        reordered = reordered_tensors(self._trainer.lightning_module, state["state_dict"])
        for number, optimizer in enumerate(self.optimizers()):
            check_memory_orders(f"optimizer_states.{number}", stepping(optimizer), reordered)
        warn_of_reordered(reordered)
        for optimizer, saved in zip(self.optimizers(), state["optimizer_states"], strict=False):
            put_back(optimizer, saved)
        self._connector.restore_lr_schedulers()

    def _is_resized(self, extra: dict[str, Any]) -> bool:
        """True if the state was collected with another number of ranks."""
        return bool(extra["world_size"] != self._trainer.world_size)

    # ---------------------------------------------------------------- restart

    def accept(self, state: dict[str, Any]) -> None:
        """Accept a collected state for a restart.

        The connector restores its part of it. The rest waits for ``load`` and ``finish_resume``.
        Raises: StateError, if it was not collected by this class.
        """
        if EXTRAS not in state or "loops" not in state:
            raise StateError(
                "the snapshot was not taken by LazySnapshotCallback (it has no state of Lightning's loops); restore it "
                "with the loop that took it, or use another directory"
            )
        self._give_to_connector(state)
        self._resumed = _late_part(state)
        if self._trainer.state.fn != "fit":
            return
        reason = reason_of_end(self._trainer, state)
        if reason:
            self._become_finished(reason)

    def _become_finished(self, reason: str) -> None:
        """Train nothing, because the restored fit had ended."""
        self._trainer.should_stop = True  # Lightning checks it before the first epoch
        self._is_finished = True
        logger.warning(
            "nothing is left to train: %s. Hooks for the end of training do not run again; averaged weights are "
            "put into the model as they were then",
            reason,
        )

    def is_finished(self) -> bool:
        """See ``StateSource.is_finished``."""
        return self._is_finished

    @property
    def is_resuming(self) -> bool:
        """True if a restored state waits for its step boundary."""
        return self._resumed is not None

    @staticmethod
    def position_of(state: dict[str, Any]) -> str:
        """Describe the position of a collected state in the data: epoch and batch index of the next batch."""
        epoch = state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        batch = 0
        position = state[EXTRAS]["position"]
        if position is not None:
            batch = position["trained"]
        return f"epoch {epoch}, batch {batch}"

    def watch_loaders(self) -> None:
        """Find the random generators of the data loaders. Cheap; call it whenever loaders may be new."""
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None:
            self.loaders.watch(combined)
        # Training first: validation loaders may not exist yet when a restart needs their states.
        self._streams.watch([*self.loaders.loaders, *self._validation_loaders()])

    def prepare_loaders(self) -> None:
        """Give the loaders their restored positions, before they are iterated for the first time."""
        self.watch_loaders()
        resumed = self._resumed
        if resumed is None or resumed["position"] is None:
            return
        fit_loop = self._trainer.fit_loop
        epoch = resumed["fit_loop"]["epoch_progress"]["current"]["processed"]
        for loader in self.loaders.loaders:
            # Workers fetch as soon as they are iterated, before Lightning sets the sampler's epoch.
            neighbour(fit_loop, "_set_sampler_epoch")(loader, epoch)
        self.loaders.load_state_dict(resumed["position"]["loaders"])
        if self._is_resized(resumed) or self.loaders.are_recounted:
            recount(fit_loop, resumed["fit_loop"], self.loaders.passed)

    @property
    def resumes_in_epoch(self) -> bool:
        """True if a restored state waits for a boundary inside an epoch, not for the start of one."""
        return self._resumed is not None and self._resumed["position"] is not None

    def finish_resume(self) -> None:
        """Restore the state that Lightning does not restore, or would change; the random generators last."""
        assert self._resumed is not None
        self.watch_loaders()
        resumed = self._resumed
        self._resumed = None
        self._put_back(resumed)
        self._start_validation_workers(resumed["validation_workers"])
        if not self._is_resized(resumed):  # otherwise each rank has new random numbers since the restart
            self._streams.restore(resumed["streams"])

    def _put_back(self, resumed: dict[str, Any], *, in_hook: bool = False) -> None:
        trainer = self._trainer
        restore_loops(trainer, resumed["fit_loop"], resumed["loops"])
        restore_metrics(trainer, trainer.lightning_module, resumed["metrics"], in_hook=in_hook)
        restore_callbacks(trainer, resumed["callbacks"])
        for name, extras in self._extras.items():
            if name in resumed["modules"]:
                extras.restore(resumed["modules"][name])

    def _validation_loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        if combined is None:
            return []
        return list(combined.flattened)

    def _start_validation_workers(self, had_workers: list[bool]) -> None:
        trainer = self._trainer
        validation = trainer.fit_loop.epoch_loop.val_loop
        if any(had_workers) and validation._combined_loader is None:
            trainer.validating = True
            validation.setup_data()
            trainer.training = True
        start_workers(self._validation_loaders(), had_workers)

    def averages(self) -> dict[str, torch.nn.Module]:
        """Return the averaged models of the WeightAveraging callbacks."""
        return {key_of(callback): callback._average_model for callback in self._averaging_callbacks()}

    def put_averages_into_model(self) -> None:
        """Call WeightAveraging's hook for the end of a fit: Lightning calls none if nothing is trained."""
        for callback in self._averaging_callbacks():
            callback.on_train_end(self._trainer, self._trainer.lightning_module)

    def _averaging_callbacks(self) -> Iterator[Any]:
        for callback in self._trainer.callbacks:
            if isinstance(getattr(callback, "_average_model", None), torch.nn.Module):
                yield callback

    def start(self) -> None:
        """Begin the fit: from here on changes of buffers are detected.

        Raises: StateError, for a model that no restart could load.
        """
        self._check_loads()
        modules = {"": self._trainer.lightning_module, **self.averages()}
        self._extras = {name: ModuleExtras(module) for name, module in modules.items()}

    def _check_loads(self) -> None:
        """Raises: StateError, for a model that no restart could load."""
        module = self._trainer.lightning_module
        changes_state = any(overrides(module, hook) for hook in ("on_save_checkpoint", "on_load_checkpoint"))
        if module.strict_loading and not changes_state:
            # The module's own state: ModelPruning gives a checkpoint the names of a module that is not pruned yet.
            check_loads("state_dict", module, module.state_dict())


def _late_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a collected state that Lightning's connector does not restore, or changes."""
    return {**state[EXTRAS], "fit_loop": state["loops"]["fit_loop"]}


def _renamed(callbacks: Mapping[Any, Any], names: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the states of callbacks with keys replaced by ``names``, if present."""
    return {names.get(name, name): state for name, state in callbacks.items()}
