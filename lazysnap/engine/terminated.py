"""The end of a training by SIGTERM: what can be saved in the time that is left."""

import logging

from lazysnap.engine.engine import SnapshotEngine

logger = logging.getLogger(__name__)


def save_before_exit(engine: SnapshotEngine, step: int, *, is_boundary: bool) -> None:
    """Make the newest snapshot durable, and tell what became of it; ``is_boundary``: ``step`` is over, capture it.

    With several ranks all call it at the same step. Blocks: at most ``flush_budget_s``.
    """
    if is_boundary:
        engine.boundary(step, force=True)
        engine.gate()
    budget_s = engine.config.flush_budget_s
    is_durable = bool(engine.config.levels) and engine.flush(budget_s)
    why_lost = engine.statistics().unprotected
    if is_durable:
        what = "the last snapshot is durable"
        engine.close(drain=False)
    elif why_lost is not None:
        what = f"the last step is not durable after {budget_s:g} s, and NOT protected in memory: {why_lost}"
    else:
        what = f"the last snapshot is in memory, not durable after {budget_s:g} s; the keeper goes on writing it"
    logger.warning("terminated at step %d: %s", step, what)
