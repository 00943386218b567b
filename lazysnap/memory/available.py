"""The memory that this process may still take: of the machine, and of every control group of the process."""

import os
from collections.abc import Iterator

_FILES_V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes")
_FILES_V2 = ("memory.current", "memory.max", "memory.high")
"""The usage, then the limits. Above ``memory.high`` the kernel throttles a process."""


def available_bytes(root: str = "/") -> int:
    """Return the memory that can be taken without swapping and without the out-of-memory killer.

    The minimum of the machine's available memory and the rest of each visible control group (version 1 or 2) of the
    process. ``root``: the directory that contains ``proc`` and ``sys``. Without ``proc`` the result is the total memory
    of the machine.
    """
    available = _machine_bytes(root)
    for folder, names in _groups(root):
        try:
            used = _number(f"{folder}/{names[0]}") - _reclaimable_bytes(f"{folder}/memory.stat")
        except (OSError, ValueError):
            continue  # the outermost group of version 2 has no figures
        for name in names[1:]:
            try:
                available = min(available, _number(f"{folder}/{name}") - used)
            except (OSError, ValueError):
                continue  # "max": no limit
    return max(0, available)


def _machine_bytes(root: str) -> int:
    for line in _lines(os.path.join(root, "proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Without /proc nothing shows how much of the memory in use is caches.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each control group's folder, the innermost first, and the names of its files."""
    mounts = _mounts(root)
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        hierarchy, controllers, path = line.split(":", 2)
        names: tuple[str, ...]
        if hierarchy == "0":
            names = _FILES_V2
            mount = mounts.get("cgroup2")
        elif "memory" in controllers.split(","):
            names = _FILES_V1
            mount = mounts.get("cgroup")
        else:
            continue
        if mount is not None:
            for folder in _chain(root, *mount, path):
                yield folder, names


def _mounts(root: str) -> dict[str, tuple[str, str]]:
    """Return the mounted group and its mount point, by type of file system: version 2, and the memory controller."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in _lines(os.path.join(root, "proc/self/mountinfo")):
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        fs_type, _, options = source.split(" ", 2)
        if fs_type == "cgroup2" or (fs_type == "cgroup" and "memory" in options.split(",")):
            mounts.setdefault(fs_type, (fields[3], fields[4]))
    return mounts


def _chain(root: str, mounted: str, mount_point: str, path: str) -> Iterator[str]:
    """Yield the folder of the group ``path``, then of each group around it, up to the ``mounted`` one.

    A container may see a path that is not below the mounted group: then the mounted group is that of the process.
    """
    top = os.path.join(root, mount_point.lstrip("/"))
    inside = os.path.relpath(path, mounted)
    parts = inside.split("/")
    if inside.startswith("..") or inside == ".":
        parts = []
    for count in range(len(parts), -1, -1):
        yield os.path.join(top, *parts[:count])


def _lines(path: str) -> list[str]:
    """Return the lines of a file; none where it cannot be read."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def _reclaimable_bytes(path: str) -> int:
    """Return the pages of files that the kernel drops when memory is needed, as ``MemAvailable`` counts them.

    Version 1 counts those of inner groups separately, in fields that begin with ``total_``.
    """
    with open(path) as file:
        fields = dict(line.split() for line in file)
    inactive = fields.get("total_inactive_file", fields.get("inactive_file", 0))
    active = fields.get("total_active_file", fields.get("active_file", 0))
    return int(inactive) + int(active) // 2
