"""Counters and timings of an engine."""

import copy
from collections import Counter
from dataclasses import dataclass, field, fields

NO_SLOTS = "memory was being prepared"
ALL_IN_USE = "all copies in memory were in use"
NO_MEMORY = "there was no memory"
"""Reasons in ``Statistics.skipped``. The first two pass by themselves."""


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
    """Counters of one engine since it was made."""

    began: int = 0
    """Captures started."""
    whole: int = 0
    """Captures known to be complete in the keeper's memory."""
    torn: int = 0
    """Captures discarded because something changed while it was copied."""
    failed: int = 0
    """Captures given up for another reason."""
    keepers_lost: int = 0
    restart_check: str | None = None
    """``"identical"`` if the step that a restart trained again was so on this rank, bit for bit; else what differed.
    ``None``: no comparison is over."""
    rollbacks: int = 0
    """Times that training went back in place."""
    shard_bytes: int = 0
    """Size of one snapshot of this rank."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Boundaries that were due but began no capture, by reason."""
    persisted: Counter[str] = field(default_factory=Counter)
    """Snapshots that became durable, by level: all ranks have their part there, read back."""
    level_failures: Counter[str] = field(default_factory=Counter)
    """Steps that were not stored because of an error, by level."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Due steps that a level left out because it was slower than the ones before it, or than training, by level. None
    at a level that stores by time: there no step is due by its number."""
    boundary: Timing = field(default_factory=Timing)
    """Time that training was held at boundaries that began a capture, after the gate, without ``memory_wait_s``."""
    memory_wait_s: float = 0.0
    """Seconds that training waited for memory to be ready, at its first boundary."""
    preparation_s: float = 0.0
    """Seconds for which steps were skipped because memory was being prepared: from the first of them to the next
    capture."""
    gate: Timing = field(default_factory=Timing)
    """Time that training waited for copies."""
    copy: Timing = field(default_factory=Timing)
    """Duration of the copies themselves, during training."""
    unprotected: str | None = None
    """Why nothing is captured now: there is no memory that outlives this process. ``None`` if there is."""
    waited_s: float = 0.0
    """Seconds that the training thread waited in all: at gates, and at boundaries that were due, captured or not."""
    device_wait_s: float = 0.0
    """Seconds that devices stood still at gates until the copies from them were done, as far as they have come."""
    last_whole_step: int | None = None
    """Newest capture of this start that is whole in the memory of a keeper that lives."""
    protected: int = 0
    """Snapshots that other nodes protect, or did."""
    last_protected_step: int | None = None
    """Newest capture of this start that survives the loss of a node; ``None``: none, or nodes do not protect each
    other."""
    last_durable_step: dict[str, int] = field(default_factory=dict)
    """Newest durable step of this start, by level."""

    def copied(self) -> "Statistics":
        """Return a copy that nothing changes any more. Thread-safe: each dict is copied as one act."""
        values = {item.name: copy.copy(getattr(self, item.name)) for item in fields(self)}
        return Statistics(**values)
