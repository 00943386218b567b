"""Whether slots fit into memory, and what to change where they do not. Pure."""

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def readable(size_bytes: float) -> str:
    """A number of bytes for a message: ``3.6 GB``."""
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} bytes"


def refusal(count: int, slot_bytes: int, available_bytes: int, *, least: int, is_bound: bool) -> str:
    """Why ``count`` slots do not fit, and what would.

    ``least``: the smallest number of slots that this training may be given. ``is_bound``: ``available_bytes`` is what
    ``MemoryLevel.max_bytes`` leaves, else what the machine or its container has.
    """
    whose = "MemoryLevel.max_bytes leaves" if is_bound else "this machine (or its container) has"
    asked = f"{count} slots of {slot_bytes} bytes need {count * slot_bytes} bytes ({readable(count * slot_bytes)})"
    found = f"{whose} {available_bytes} ({readable(available_bytes)})"
    more = f"raise max_bytes to {count * slot_bytes}" if is_bound else "free memory, or use a larger machine"
    fitting = available_bytes // slot_bytes
    if least < count and fitting >= least:
        advice = f"set MemoryLevel(slots={fitting}), which fits, or {more}"
    elif fitting == 0:
        advice = f"not even one fits: {more}, or capture a smaller state"
    elif least < count:
        advice = f"{least} slots, the least that protect a run, do not fit either: {more}, or capture a smaller state"
    else:
        advice = f"fewer would not protect this run: {more}, or capture a smaller state"
    return f"{asked}, {found}; {advice}"
