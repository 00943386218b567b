"""A refusal that all ranks share: where one cannot go on, none waits for it until a deadline."""

from collections.abc import Callable

from lazysnap.engine.world import World
from lazysnap.errors import (
    ConfigError,
    JobBusy,
    KeeperUnavailable,
    LazySnapError,
    LevelUnavailable,
    MemoryBoundExceeded,
    StateError,
    StateMismatch,
    UnsupportedState,
)

_SHARED = (
    ConfigError,
    JobBusy,
    KeeperUnavailable,
    LevelUnavailable,
    MemoryBoundExceeded,
    StateMismatch,
    UnsupportedState,
)
_KINDS: dict[str, type[LazySnapError]] = {kind.__name__: kind for kind in _SHARED}


def together(world: World, what: str, work: Callable[[], None]) -> None:
    """Do ``work`` on every rank; if it raises on one of them, all raise, naming that rank and its reason. Collective.

    Blocks: until all have done theirs. Raises: as ``work`` does, of the kinds in ``_SHARED``; for
    any other error StateError, with that error as the cause on the rank that met it; WaitTimeout.
    """
    if world.is_alone:
        work()
        return
    causes: list[Exception] = []

    def outcome() -> list[str] | None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  objects of users load themselves: they raise what they like
            causes.append(error)
            return [type(error).__name__, str(error)]
        return None

    told = world.exchange_after(what, outcome)
    refusals = [(rank, answer) for rank, answer in enumerate(told) if answer is not None]
    if not refusals:
        return
    rank, (kind, text) = refusals[0]
    others = f" (and {len(refusals) - 1} more ranks)" if len(refusals) > 1 else ""
    reason = text if kind in _KINDS else f"{kind}: {text}"
    raise _KINDS.get(kind, StateError)(f"rank {rank}{others}: {reason}") from next(iter(causes), None)
