"""Strategies of several processes: which of them can be captured, and their state as this rank alone has it.

DDP (also spawned or forked) keeps the whole model on every rank; ModelParallelStrategy (FSDP2, tensor parallelism)
shards it, and its own methods gather what is sharded, by collectives. A snapshot needs none.
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

_OTHERS = {
    "DeepSpeedStrategy": "ModelParallelStrategy (FSDP2) shards as ZeRO 3 does",
    "FSDPStrategy": "use ModelParallelStrategy (FSDP2), which took its place",
    "XLAStrategy": "XLA devices are not supported",
}


def check_strategy(trainer: Any) -> None:
    """Raises: ConfigError, where a strategy keeps its state in a way that would be captured wrongly."""
    if getattr(trainer.strategy, "_model_averaging_period", None) is not None:
        raise ConfigError(
            f"LazySnapshotCallback: {type(trainer.strategy).__name__}(model_averaging_period=...) is not supported: "
            "with local SGD the weights of ranks differ until they are averaged, so no step is common to all; leave it "
            "out, or take the callback out and use ModelCheckpoint"
        )
    kinds = _kinds(trainer.strategy)
    # DeepSpeedStrategy is a DDPStrategy, too, and cuts parameters also for one process.
    advice = next((text for name, text in _OTHERS.items() if name in kinds), None)
    if trainer.world_size == 1 and advice is None:
        return
    if advice is not None or not kinds & {"DDPStrategy", "ModelParallelStrategy"}:
        processes = f"{trainer.world_size} process{'es' * (trainer.world_size > 1)}"
        raise ConfigError(
            f"LazySnapshotCallback: {processes} of {type(trainer.strategy).__name__} are not "
            'supported, strategy="ddp" (also _spawn, _fork, _notebook) and ModelParallelStrategy are: '
            f"{advice or 'use one of these'}, or take the callback out and use ModelCheckpoint"
        )


def check_parts(trainer: Any) -> None:
    """Raises: ConfigError, for a module or an optimizer that shards its state itself, or fetches its own batches."""
    fetcher = trainer.fit_loop._data_fetcher
    if isinstance(fetcher, neighbour(fetcher, "_DataLoaderIterDataFetcher")):
        raise ConfigError(
            "LazySnapshotCallback: training_step(dataloader_iter) is not supported yet: batches are fetched inside the "
            "step, and there is no point between two steps; take a batch as the argument instead"
        )
    optimizers = {f"optimizer {number}": one for number, one in enumerate(trainer.strategy.optimizers)}
    try:
        check_supported({"the module": trainer.lightning_module, **optimizers})
    except StateError as error:
        raise ConfigError(f"LazySnapshotCallback: {error}; in Lightning ModelParallelStrategy is FSDP2") from error


def _kinds(strategy: Any) -> set[str]:
    return {cls.__name__ for cls in type(strategy).__mro__}


@contextlib.contextmanager
def own_state(trainer: Any) -> Iterator[None]:
    """While it lasts, the strategy returns the state that this rank holds: views, no collective; the fit loop asks no
    data loader for its state; a ``GradScaler`` is not waited for.
    """
    patches, strategy, plugin = Patches(), trainer.strategy, trainer.precision_plugin
    if isinstance(scaler := getattr(plugin, "scaler", None), torch.amp.GradScaler):
        patches.replace(plugin, "state_dict", lambda _: state_of_scaler(scaler))
    patches.replace(trainer.fit_loop, "on_save_checkpoint", lambda _: {})
    if "ModelParallelStrategy" in _kinds(strategy):
        patches.replace(strategy, "lightning_module_state_dict", lambda _: strategy.lightning_module.state_dict())
        patches.replace(strategy, "optimizer_state", lambda _, optimizer: stepping(optimizer).state_dict())
    try:
        yield
    finally:
        patches.undo()
