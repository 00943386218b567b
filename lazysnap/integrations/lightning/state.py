"""The whole state of a Lightning fit at point X, and how a restart lands exactly there.

Point X is just before the next batch is fetched. By then everything of step k is over: learning rates, averaged
weights, ModelCheckpoint, validation, counters, loggers; nothing of step k+1 has begun. What Lightning's own checkpoint
holds is restored by Lightning; the rest (and the counters, since Lightning turns them for its own kind of restart) is
put back when the restarted fit reaches the same point.

Not in a snapshot: attributes of modules and callbacks that no ``state_dict`` or ``on_save_checkpoint`` gives; the
schedule that StochasticWeightAveraging swaps in; masks that ModelPruning leaves out of its checkpoints on purpose.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
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
from lazysnap.integrations.lightning.loops import collect_loops, reason_of_end, recount, restore_loops
from lazysnap.integrations.lightning.rollback import with_present_data
from lazysnap.integrations.lightning.strategies import own_state
from lazysnap.state.codec import path_text
from lazysnap.state.left_out import LeftOut, Path, with_values_of
from lazysnap.state.loading import check_loads, load_module
from lazysnap.state.modules import reordered_tensors, warn_of_reordered
from lazysnap.state.optimizers import check_memory_orders, classes_of, put_back
from lazysnap.state.scalars import pack, plain_numbers, unpack
from lazysnap.state.source import KEY, OPTIMIZERS, StateSource
from lazysnap.state.wrappers import stepping

logger = logging.getLogger(__name__)

_OWN = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"}
"""Keys that Lightning itself writes into a checkpoint; all else is from the program, or from its callbacks."""
_MOST_NAMED = 8
"""Paths in one warning."""
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_LEFT_OUT = "left_out"
"""Below ``KEY``: paths of the program's values that the snapshot does not hold."""


class _Ours(dict[str, Any]):
    """A checkpoint that is the part of a snapshot which Lightning's connector puts back."""


class LightningState(StateSource):
    """The ``StateSource`` of one fit (or of one evaluation, for ``expected`` only).

    It has many methods: those of the interface, and the moments of a fit at which parts of the state are restored.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._streams = RandomStreams()
        self.loaders = LoaderPositions()
        self._extras: dict[str, ModuleExtras] = {}
        self._landing: dict[str, Any] | None = None
        self._loads_checked = False
        self.has_ended = False
        """True if the restored fit has nothing left to train."""
        self._told_left_out: set[Path] = set()
        """Paths that a warning has named."""

    # ---------------------------------------------------------------- StateSource

    def collect(self) -> dict[str, Any]:
        """See ``StateSource.collect``. Calls the hooks for checkpoints of the program."""
        trainer = self._trainer
        with own_state(trainer):
            state: dict[str, Any] = dict(self._connector.dump_checkpoint(False))
        for name, value in state.items():
            if isinstance(value, dict) and name.endswith(("state_dict", "model_state")):
                state[name] = dict(value)
        state["callbacks"] = pack(self._by_name(state.get("callbacks", {})))
        if not self._loads_checked:
            self._check_loads(state)
        left_out = self._leave_out(state)
        loops = collect_loops(trainer)
        position = None
        if not loops["between_epochs"]:
            trained = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            position = {"trained": trained, "loaders": self.loaders.state_dict()}
        state[KEY] = {
            "loops": loops,
            "position": position,
            "world_size": trainer.world_size,
            "metrics": collect_metrics(trainer, trainer.lightning_module),
            "callbacks": collect_callbacks(trainer),
            "modules": {name: extras.collect() for name, extras in self._extras.items()},
            "validation_workers": running_workers(self._validation_loaders()),
            "streams": self._streams.collect(),
            OPTIMIZERS: classes_of(self),
        }
        if left_out:
            state[KEY][_LEFT_OUT] = left_out
        return state

    def _check_loads(self, state: Mapping[str, Any]) -> None:
        """Raises: StateError, for a model that no restart could load."""
        self._loads_checked = True
        module = self._trainer.lightning_module
        changes_state = any(overrides(module, hook) for hook in ("on_save_checkpoint", "on_load_checkpoint"))
        if module.strict_loading and not changes_state:
            check_loads("state_dict", module, state["state_dict"])

    def _by_name(self, callbacks: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the states of callbacks by ``key_of`` instead of ``state_key``."""
        names = {callback.state_key: key_of(callback) for callback in self._trainer.callbacks}
        return {names.get(key, key): state for key, state in callbacks.items()}

    def _leave_out(self, state: dict[str, Any]) -> list[list[Any]]:
        """Remove values of unknown types from what the program added to ``state``, and return their paths.

        A warning names each path once. Hyperparameters become plain values where they can.
        """
        own = {*_OWN, type(self._trainer.precision_plugin).__qualname__}
        program = {name: value for name, value in state.items() if name not in own}
        left_out = LeftOut(plain_below=_HPARAMS)
        kept = left_out.without(program)
        for name in program:
            state.pop(name)
        state |= kept
        new = {path: kind for path, kind in left_out.kinds.items() if path not in self._told_left_out}
        self._told_left_out |= new.keys()
        if new and self._trainer.is_global_zero:
            named = [f"{path_text(path)} ({kind})" for path, kind in new.items()]
            if len(named) > _MOST_NAMED:
                named[_MOST_NAMED:] = [f"and {len(named) - _MOST_NAMED} more"]
            logger.warning(
                "values of types that a snapshot cannot hold are left out of every snapshot (hyperparameters: stored "
                "as plain values, where they have such): %s. A restart takes what the program has there at that time, "
                "which is exact for values that training does not change; for others call "
                "lazysnap.register_type(cls, name=..., encode=..., decode=...) before the training",
                ", ".join(named),
            )
        return [list(path) for path in left_out.kinds]

    def _with_live_values(self, checkpoint: dict[str, Any], paths: list[list[Any]]) -> dict[str, Any]:
        """Return ``checkpoint`` with what the program's hooks give now at ``paths``, where it was left out."""
        live: dict[str, Any] = {}
        why = "its hooks give no value there now"
        try:
            with own_state(self._trainer):
                live = dict(self._connector.dump_checkpoint(False))
            live["callbacks"] = self._by_name(live.get("callbacks", {}))
        except Exception as error:  # noqa: BLE001  hooks of the program, which may need a training that runs
            why = f"its hooks for checkpoints raised {type(error).__name__}: {error}"
        checkpoint, missing = with_values_of(live, checkpoint, paths)
        if missing and self._trainer.is_global_zero:
            logger.warning(
                "values that were left out of the snapshot could not be taken from the program, since %s: %s",
                why,
                ", ".join(map(path_text, missing)),
            )
        return checkpoint

    def named(self) -> Mapping[str, Any]:
        """See ``StateSource.named``: the model as its strategy wrapped it, not averages of it; its optimizers."""
        strategy = self._trainer.strategy
        optimizers = {f"optimizer_states.{number}": one for number, one in enumerate(strategy.optimizers)}
        return {"state_dict": strategy.model, **optimizers}

    def lazy_tensors(self) -> Iterable[torch.Tensor]:
        """See ``StateSource.lazy_tensors``: the parameters of averaged models, which change at the end of a batch."""
        for average in self.averages().values():
            yield from average.parameters()

    def expected(self) -> Mapping[str, torch.Tensor]:
        """See ``StateSource.expected``. Empty where the program itself decides what a checkpoint holds."""
        module = self._trainer.lightning_module
        hooks = ("on_save_checkpoint", "on_load_checkpoint")
        decides = all(overrides(module, hook) for hook in hooks)
        if not module.strict_loading or decides:
            return {}
        return {f"state_dict.{name}": value for name, value in module.state_dict().items() if torch.is_tensor(value)}

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """See ``StateSource.load``. At a restart, behind ``admit``: what the connector did not restore yet; all else
        waits for ``land``. In a rollback, at the end of a batch: everything but the data.

        Calls the ``on_load_checkpoint`` hooks of the program. Raises: what they and ``load_state_dict`` raise.
        """
        if self.is_landing:
            self._load_training(state)
            return
        with own_state(self._trainer):
            state = with_present_data(self._trainer, list(self.optimizers()), state)
        own = state[KEY]
        self._begin(state)
        try:
            self._connector.restore_model()
            self._connector.restore_callbacks()
            self._load_training(self._connector._loaded_checkpoint)
        finally:
            self._connector._loaded_checkpoint = {}
        self._put_back({**own, "fit_loop": state["loops"]["fit_loop"]}, in_hook=True)
        self._streams.restore(own["streams"])

    def _begin(self, state: dict[str, Any]) -> None:
        """Give the connector its part of a collected state."""
        checkpoint = {name: value for name, value in state.items() if name != KEY}
        checkpoint["callbacks"] = unpack(checkpoint["callbacks"])
        if left_out := state[KEY].get(_LEFT_OUT):
            checkpoint = self._with_live_values(checkpoint, left_out)
        plugin = type(self._trainer.precision_plugin).__qualname__
        if isinstance(scaler := checkpoint.get(plugin), dict):
            checkpoint[plugin] = plain_numbers(scaler)
        keys = {key_of(callback): callback.state_key for callback in self._trainer.callbacks}
        checkpoint["callbacks"] = {keys.get(name, name): value for name, value in checkpoint["callbacks"].items()}
        migrate = neighbour(self._connector, "_pl_migrate_checkpoint")
        self._connector._loaded_checkpoint = _Ours(migrate(checkpoint, "latest"))

    @property
    def is_loading(self) -> bool:
        """True if the connector is restoring our state, and not a file."""
        return isinstance(self._connector._loaded_checkpoint, _Ours)

    def load_model(self, original: Callable[..., None], checkpoint: Any, *, strict: bool = True) -> None:
        """Replace the strategy's method: a sharded one would expect that its own files were read before."""
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

    def _is_of_other_ranks(self, own: dict[str, Any]) -> bool:
        return bool(own["world_size"] != self._trainer.world_size)

    # ---------------------------------------------------------------- restart

    def admit(self, state: dict[str, Any]) -> None:
        """Take a collected state in: the connector restores its part of it, the rest waits for ``load`` and ``land``.

        Raises: StateError, if it was not collected by this class.
        """
        if KEY not in state or "loops" not in state:
            raise StateError(
                "the snapshot was not taken by LazySnapshotCallback (it has no state of Lightning's loops); restore it "
                "with the loop that took it, or use another directory"
            )
        self._begin(state)
        self._landing = {**state[KEY], "fit_loop": state["loops"]["fit_loop"]}
        if self._trainer.state.fn == "fit" and (why := reason_of_end(self._trainer, state)):
            self._trainer.should_stop = True  # Lightning asks before the first epoch
            self.has_ended = True
            logger.warning(
                "nothing is left to train: %s. Hooks for the end of training do not run again; averaged weights are "
                "put into the model as they were then",
                why,
            )

    def is_finished(self) -> bool:
        """See ``StateSource.is_finished``."""
        return self.has_ended

    @property
    def is_landing(self) -> bool:
        """True if a restored state still waits for its point X."""
        return self._landing is not None

    @staticmethod
    def position_of(state: dict[str, Any]) -> str:
        """Describe the position of a collected state in the data: epoch and batch index of the next batch."""
        position = state[KEY]["position"]
        epoch = state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        return f"epoch {epoch}, batch {position['trained'] if position is not None else 0}"

    def watch_loaders(self) -> None:
        """Find the random generators that the data loaders own; cheap, and again whenever loaders may be new."""
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None:
            self.loaders.watch(combined)
        # Training first: validation loaders may not be there yet when a restart asks for the states of these.
        self._streams.watch([*self.loaders.loaders, *self._validation_loaders()])

    def prepare_loaders(self) -> None:
        """Before the loaders are iterated for the first time."""
        self.watch_loaders()
        if self._landing is not None and self._landing["position"] is not None:
            fit_loop = self._trainer.fit_loop
            for loader in self.loaders.loaders:
                # Workers fetch as soon as they are iterated, before Lightning sets the sampler's epoch.
                epoch = self._landing["fit_loop"]["epoch_progress"]["current"]["processed"]
                neighbour(fit_loop, "_set_sampler_epoch")(loader, epoch)
            self.loaders.load_state_dict(self._landing["position"]["loaders"])
            if self._is_of_other_ranks(self._landing) or self.loaders.are_recounted:
                recount(fit_loop, self._landing["fit_loop"], self.loaders.passed)

    def lands_in_epoch(self) -> bool:
        """True if the landing is inside an epoch (else at the start of one)."""
        return self._landing is not None and self._landing["position"] is not None

    def land(self) -> None:
        """Put back what Lightning does not know or would turn, last of all the random generators."""
        assert self._landing is not None
        self.watch_loaders()
        landing, self._landing = self._landing, None
        self._put_back(landing)
        self._start_validation_workers(landing["validation_workers"])
        if not self._is_of_other_ranks(landing):  # else each has random numbers of its own since the restart
            self._streams.restore(landing["streams"])

    def _put_back(self, own: dict[str, Any], *, in_hook: bool = False) -> None:
        trainer = self._trainer
        restore_loops(trainer, own["fit_loop"], own["loops"])
        restore_metrics(trainer, trainer.lightning_module, own["metrics"], in_hook=in_hook)
        restore_callbacks(trainer, own["callbacks"])
        for name, extras in self._extras.items():
            if name in own["modules"]:
                extras.restore(own["modules"][name])

    def _validation_loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return list(combined.flattened) if combined is not None else []

    def _start_validation_workers(self, wanted: list[bool]) -> None:
        trainer, validation = self._trainer, self._trainer.fit_loop.epoch_loop.val_loop
        if any(wanted) and validation._combined_loader is None:
            trainer.validating = True
            validation.setup_data()
            trainer.training = True
        start_workers(self._validation_loaders(), wanted)

    def averages(self) -> dict[str, torch.nn.Module]:
        """The averaged models of the WeightAveraging callbacks."""
        found = {key_of(item): getattr(item, "_average_model", None) for item in self._trainer.callbacks}
        return {key: average for key, average in found.items() if isinstance(average, torch.nn.Module)}

    def put_averages_into_model(self) -> None:
        """Do what WeightAveraging does at the end of a fit: Lightning calls no hook where nothing is trained."""
        for callback in self._trainer.callbacks:
            if isinstance(getattr(callback, "_average_model", None), torch.nn.Module):
                callback.on_train_end(self._trainer, self._trainer.lightning_module)

    def leave(self) -> None:
        """The fit is over: loaders are as they were."""
        self.loaders.forget()

    def start(self) -> None:
        """The fit begins: buffers count as changed from here on."""
        modules = {"": self._trainer.lightning_module, **self.averages()}
        self._extras = {name: ModuleExtras(module) for name, module in modules.items()}
