"""When training goes back by itself: policies that judge the loss of each step, and the watch that acts on them."""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lazysnap.engine.engine import SnapshotEngine
from lazysnap.engine.rollback import Rollback
from lazysnap.errors import ConfigError, LazySnapError


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Go back when the loss is NaN or infinite.

    Raises: ConfigError, for settings that cannot work.
    """

    steps: int = 1
    """Steps to go back, see ``SnapshotEngine.rollback``; 1: to the last boundary, if that was captured."""
    max_rollbacks: int = 3
    """Rollbacks without a new step in between; the next one raises LazySnapError."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("max_rollbacks", 0)):
            _check_count(f"{type(self).__name__}.{name}", getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class LossSpike(NonFinite):
    """Go back when the loss is above ``factor`` times the running median of the last good losses, or not finite.

    Raises: ConfigError, for settings that cannot work.
    """

    factor: float = 5.0
    window: int = 50
    """Number of good losses that the median is of. Fewer are not judged, nor where the median is not positive; after a
    restart the window fills anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.factor, (int, float)) or not 1 < self.factor < math.inf:
            raise ConfigError(f"LossSpike.factor must be a number above 1, got {self.factor!r}")
        _check_count("LossSpike.window", self.window, 1)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_policy(policy: object, name: str) -> None:
    """Raises: ConfigError, if ``policy``, which is called ``name``, is none."""
    if not isinstance(policy, NonFinite):
        raise ConfigError(f"{name} must be a NonFinite() or a LossSpike(), got {policy!r:.100}")


class LossWatch:
    """Judges every loss of a loop, and rolls back on a bad one::

        watch = LossWatch(NonFinite(), engine)
        for batch in loader:                  # goes on behind the bad batch
            loss = train_on(batch)            # forward, backward, optimizer.step()
            if not watch.see(loss):           # else all is as it was at engine.step
                engine.boundary()

    Call it once per step, before ``boundary``, on all ranks: a loss that is bad on one rank is bad on all. With
    accumulation call ``is_bad`` for each micro batch, and ``go_back`` at the end of the window if one was bad.
    A good loss costs one read of a number from its device, and with several ranks one ``all_reduce`` of a number.
    Raises: ConfigError, for a policy or an engine that is none.
    """

    def __init__(self, policy: NonFinite, engine: SnapshotEngine) -> None:
        check_policy(policy, "LossWatch.policy")
        if not isinstance(engine, SnapshotEngine):
            raise ConfigError(f"LossWatch.engine must be a SnapshotEngine, got {engine!r:.100}")
        self._policy = policy
        self._engine = engine
        self._good: deque[float] = deque(maxlen=policy.window if isinstance(policy, LossSpike) else 0)
        self._reason = ""
        self._furthest = -1
        """The last boundary before the rollbacks that count."""
        self._rollbacks = 0
        self.is_spoilt = False
        """True if a loss was bad since the last rollback."""
        self.last: Rollback | None = None
        """The last rollback."""

    def see(self, loss: Any) -> bool:
        """``is_bad``, and if so ``go_back``; not for ``None``. Collective. Blocks: until the loss is computed.

        Raises: as both of these.
        """
        if loss is None:
            raise _no_loss(loss)
        is_bad = self.is_bad(loss)
        if is_bad:
            self.go_back()
        return is_bad

    def is_bad(self, loss: Any) -> bool:
        """True if a loss (number, tensor, or ``None``: nothing to judge) is bad on any rank. Collective. Blocks.

        Raises: ConfigError, for anything else.
        """
        value = _number_of(loss)
        reason = "" if value is None else self._judge(value)
        if not _on_any_rank(bool(reason)):
            if value is not None:
                self._good.append(value)
            return False
        self._reason, self.is_spoilt = reason or "the loss of another rank is bad", True
        return True

    def go_back(self) -> Rollback:
        """Roll back after a bad loss. Collective. Blocks: see ``SnapshotEngine.rollback``.

        Raises: LazySnapError, if it was done ``max_rollbacks`` times and no step was added since; as ``rollback``.
        """
        self.is_spoilt, reached = False, self._engine.step
        if reached > self._furthest:
            self._furthest, self._rollbacks = reached, 0
        policy = self._policy
        if self._rollbacks >= policy.max_rollbacks:
            raise LazySnapError(
                f"{self._reason}, after {self._rollbacks} rollbacks without a step beyond {self._furthest} "
                f"({type(policy).__name__}.max_rollbacks). The snapshots are as they were; look at the data since that "
                "step and at the learning rate, or go further back with steps"
            )
        self._rollbacks += 1
        self.last = self._engine.rollback(steps=policy.steps, reason=self._reason)
        return self.last

    def _judge(self, value: float) -> str:
        """Why a loss is bad; empty if it is good."""
        if not math.isfinite(value):
            return f"the loss is {value}"
        policy = self._policy
        if not isinstance(policy, LossSpike) or len(self._good) < policy.window:
            return ""
        median = statistics.median(self._good)
        if median <= 0 or value <= policy.factor * median:
            return ""
        return f"the loss is {value:g}, {value / median:.1f} times the median of the last {policy.window}"


def _number_of(loss: Any) -> float | None:
    if loss is None:
        return None
    if isinstance(loss, torch.Tensor) and loss.numel() and not loss.is_complex():
        # Of several elements the worst counts: max lets NaN through, and minus infinity must not hide.
        loss = loss.detach()
        return float(loss if loss.numel() == 1 else loss.sum() if not torch.isfinite(loss).all() else loss.max())
    if isinstance(loss, (str, bytes, complex, torch.Tensor)):
        raise _no_loss(loss)
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        raise _no_loss(loss) from error


def _no_loss(loss: Any) -> ConfigError:
    return ConfigError(f"LossWatch.see: a loss is a number or a tensor of real numbers, got {loss!r:.100}")


def _on_any_rank(is_bad: bool) -> bool:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return is_bad
    # Among the devices of a group may be the CPU; of NCCL's it is not.
    device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else None
    count = torch.tensor(int(is_bad), device=device or "cpu")
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return bool(count.item())
