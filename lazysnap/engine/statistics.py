"""Counters and timings of an engine."""

import copy
from collections import Counter
from dataclasses import dataclass, field, fields

NO_SLOTS = "memory was being prepared"
ALL_IN_USE = "all copies in memory were in use"
NO_MEMORY = "there was no memory"
"""Reasons in ``Statistics.skipped``. The first two are temporary."""


@dataclass
class Timing:
    """Seconds spent in one kind of call."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    last_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.count += 1
        self.total_s += seconds
        self.last_s = seconds
        self.max_s = max(self.max_s, seconds)


@dataclass
class Statistics:
    """Counters of one engine."""

    began: int = 0
    """Captures started."""
    whole: int = 0
    """Captures known to be complete in the keeper's memory."""
    torn: int = 0
    """Captures discarded because a tensor changed during the copy."""
    failed: int = 0
    """Captures discarded for another reason."""
    keepers_lost: int = 0
    restart_check: str | None = None
    """``"identical"`` if the step that a restart repeated was identical on this rank, bit for bit; else what differed.
    ``None`` before the end of a comparison.
    """
    rollbacks: int = 0
    """Number of rollbacks."""
    shard_bytes: int = 0
    """Size of one snapshot of this rank."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Due boundaries that began no capture, by reason."""
    persisted: Counter[str] = field(default_factory=Counter)
    """Snapshots that became durable, by level: all ranks stored their part, and it was read back."""
    level_failures: Counter[str] = field(default_factory=Counter)
    """Steps that were not stored because of an error, by level."""
    boundary: Timing = field(default_factory=Timing)
    """Time that training waited at boundaries that began a capture, without the gate and ``memory_wait_s``."""
    memory_wait_s: float = 0.0
    """Seconds that training waited for memory, at its first boundary."""
    gate: Timing = field(default_factory=Timing)
    """Time that training waited for copies."""
    copy: Timing = field(default_factory=Timing)
    """Duration of the copies, during training."""
    unprotected: str | None = None
    """The reason if nothing is captured, because no memory outlives this process; ``None`` otherwise."""
    waited_s: float = 0.0
    """Seconds that the training thread waited in all: at gates and at due boundaries."""
    device_wait_s: float = 0.0
    """Seconds that devices waited at gates for copies."""
    last_whole_step: int | None = None
    """Newest capture of this start that is whole in the memory of a live keeper."""
    protected: int = 0
    """Snapshots that other nodes protect or protected."""
    last_protected_step: int | None = None
    """Newest capture of this start that survives the loss of a node, if any."""
    last_durable_step: dict[str, int] = field(default_factory=dict)
    """Newest durable step of this start, by level."""

    def copied(self) -> "Statistics":
        """Return an independent copy. Thread-safe: each dict is copied atomically."""
        values = {item.name: copy.copy(getattr(self, item.name)) for item in fields(self)}
        return Statistics(**values)
