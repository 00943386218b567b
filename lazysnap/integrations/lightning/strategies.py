"""Strategies with several processes: checks for unsupported ones, and the local state of a rank.

DDP (also spawned or forked) keeps the whole model on every rank. ModelParallelStrategy (FSDP2, tensor parallelism)
shards it, and its own methods gather the shards by collectives. A snapshot needs no collective.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lazysnap.errors import ConfigError, StateError
from lazysnap.integrations.frameworks import Patches
from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.state.scalars import state_of_scaler
from lazysnap.state.unsupported import check_supported
from lazysnap.state.wrappers import stepping

_REFUSED = {
    "DeepSpeedStrategy": "ModelParallelStrategy (FSDP2) shards as ZeRO 3 does",
    "FSDPStrategy": "use ModelParallelStrategy (FSDP2), its successor",
    "XLAStrategy": "XLA devices are not supported",
}
"""Unsupported strategies, with advice."""


def check_strategy(trainer: Any) -> None:
    """Refuse strategies whose state would be captured wrongly. Raises: ConfigError."""
    if getattr(trainer.strategy, "_model_averaging_period", None) is not None:
        raise ConfigError(
            f"LazySnapshotCallback: {type(trainer.strategy).__name__}(model_averaging_period=...) is not supported: "
            "with local SGD the weights of ranks differ until they are averaged, so no step is common to all; leave it "
            "out, or take the callback out and use ModelCheckpoint"
        )
    kinds = _kinds(trainer.strategy)
    # DeepSpeedStrategy is a DDPStrategy, too, and cuts parameters also for one process.
    advice = "use one of these"
    is_refused = trainer.world_size > 1 and not kinds & {"DDPStrategy", "ModelParallelStrategy"}
    for name, advice_of_strategy in _REFUSED.items():
        if name in kinds:
            advice = advice_of_strategy
            is_refused = True
            break
    if is_refused:
        processes = f"{trainer.world_size} process{'es' * (trainer.world_size > 1)}"
        raise ConfigError(
            f"LazySnapshotCallback: {processes} of {type(trainer.strategy).__name__} are not "
            'supported, strategy="ddp" (also _spawn, _fork, _notebook) and ModelParallelStrategy are: '
            f"{advice}, or take the callback out and use ModelCheckpoint"
        )


def check_parts(trainer: Any) -> None:
    """Refuse modules and optimizers that shard their state themselves, or fetch their own batches. Raises:
    ConfigError.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if isinstance(fetcher, neighbour(fetcher, "_DataLoaderIterDataFetcher")):
        raise ConfigError(
            "LazySnapshotCallback: training_step(dataloader_iter) is not supported yet: batches are fetched inside the "
            "step, and there is no point between two steps; take a batch as the argument instead"
        )
    parts = {"the module": trainer.lightning_module}
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        parts[f"optimizer {number}"] = optimizer
    try:
        check_supported(parts)
    except StateError as error:
        raise ConfigError(f"LazySnapshotCallback: {error}; in Lightning ModelParallelStrategy is FSDP2") from error


def _kinds(strategy: Any) -> set[str]:
    return {cls.__name__ for cls in type(strategy).__mro__}


@contextlib.contextmanager
def state_of_rank(trainer: Any) -> Iterator[None]:
    """Make the strategy return the local state of this rank within the context: views, without a collective.

    The fit loop omits the states of data loaders, and nothing waits for a ``GradScaler``.
    """
    strategy = trainer.strategy
    plugin = trainer.precision_plugin
    scaler: Any = getattr(plugin, "scaler", None)

    def scaler_state(original: Any) -> Any:
        return state_of_scaler(scaler)

    def no_loader_states(original: Any) -> dict[str, Any]:
        return {}

    def module_state(original: Any) -> Any:
        return strategy.lightning_module.state_dict()

    def optimizer_state(original: Any, optimizer: torch.optim.Optimizer) -> Any:
        return stepping(optimizer).state_dict()

    patches = Patches()
    if isinstance(scaler, torch.amp.GradScaler):
        patches.replace(plugin, "state_dict", scaler_state)
    patches.replace(trainer.fit_loop, "on_save_checkpoint", no_loader_states)
    if "ModelParallelStrategy" in _kinds(strategy):
        patches.replace(strategy, "lightning_module_state_dict", module_state)
        patches.replace(strategy, "optimizer_state", optimizer_state)
    try:
        yield
    finally:
        patches.undo()
