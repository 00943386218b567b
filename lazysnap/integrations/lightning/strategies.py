"""Strategies of several processes: which of them can be captured, and their state as this rank alone has it.

DDP (also spawned or forked) keeps the whole model on every rank; ModelParallelStrategy (FSDP2, tensor parallelism)
shards it, and its own methods gather what is sharded, by collectives. A snapshot needs none.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from lazysnap.errors import ConfigError
from lazysnap.integrations.lightning.patches import Patches
from lazysnap.state.objects import is_local_sgd

_OTHERS = {
    "DeepSpeedStrategy": "ModelParallelStrategy (FSDP2) shards as ZeRO 3 does",
    "FSDPStrategy": "use ModelParallelStrategy (FSDP2), which took its place",
    "XLAStrategy": "XLA devices are not supported",
}


def check_strategy(trainer: Any) -> None:
    """Raises: ConfigError, where several processes keep their state in a way that would be captured wrongly."""
    if trainer.world_size == 1:
        return
    kinds = _kinds(trainer.strategy)
    known = kinds & {"DDPStrategy", "ModelParallelStrategy"}
    if not known or kinds & _OTHERS.keys():
        advice = next((text for name, text in _OTHERS.items() if name in kinds), "use one of these")
        raise ConfigError(
            f"LazySnapshotCallback: {trainer.world_size} processes of {type(trainer.strategy).__name__} are not "
            'supported, strategy="ddp" (also _spawn, _fork, _notebook) and ModelParallelStrategy are: '
            f"{advice}, or take the callback out and use ModelCheckpoint"
        )


def check_optimizers(trainer: Any) -> None:
    """Raises: ConfigError, for one that shards its state over the ranks itself."""
    for optimizer in trainer.strategy.optimizers:
        if trainer.world_size > 1 and hasattr(optimizer, "consolidate_state_dict"):
            raise ConfigError(
                f"LazySnapshotCallback: {type(optimizer).__name__} shards its state over the ranks and gathers it by "
                "collectives; shard by ModelParallelStrategy (FSDP2) instead"
            )


def _kinds(strategy: Any) -> set[str]:
    return {cls.__name__ for cls in type(strategy).__mro__}


def is_sharded(strategy: Any) -> bool:
    """Whether each rank holds a part of every parameter."""
    return "ModelParallelStrategy" in _kinds(strategy)


def replicated(strategy: Any) -> bool:
    """Whether trained parameters are equal on all ranks after every step, because their gradients are averaged."""
    if "DDPStrategy" not in _kinds(strategy):
        return False
    # A wrapped model tells; before it is wrapped, what the strategy will register.
    return not is_local_sgd(strategy.model) and getattr(strategy, "_model_averager", None) is None


@contextlib.contextmanager
def own_state(strategy: Any, inner: Callable[[Any], torch.optim.Optimizer]) -> Iterator[None]:
    """While it lasts, the strategy tells of the state that this rank holds: views, no collective."""
    patches = Patches()
    if is_sharded(strategy):
        patches.wrap(strategy, "lightning_module_state_dict", lambda _: strategy.lightning_module.state_dict)
        patches.wrap(strategy, "optimizer_state", lambda _: lambda optimizer: inner(optimizer).state_dict())
    try:
        yield
    finally:
        patches.undo()


def load_model(strategy: Any, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Into a sharded module, each rank its own shards. Not collective."""
    strategy.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)


def load_optimizers(optimizers: Iterable[torch.optim.Optimizer], checkpoint: Mapping[str, Any]) -> None:
    """Into the optimizers of a sharded module, each rank its own shards. Not collective."""
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
