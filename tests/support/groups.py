"""Control groups with a memory limit, where this machine lets us make them."""

import contextlib
import os
import pathlib
import signal
import uuid

import pytest

from support.waiting import until


def _own_group():
    """The folder of this process's group (version 1), or None."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return pathlib.Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return None


@contextlib.contextmanager
def memory_group(limit_bytes, *, inner=False):
    """A group with that limit; with ``inner`` a group without a limit inside it. Skips where none can be made.

    Yields its folder; ``joining`` puts a program into it.
    """
    own = _own_group()
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no control group for memory can be made here (root and version 1 are needed)")
    outer = own / f"lazysnap-{uuid.uuid4().hex}"
    group = outer / "inner" if inner else outer
    try:
        group.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    try:
        (outer / "memory.use_hierarchy").write_text("1")
        (outer / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        for folder in dict.fromkeys((group, outer)):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _remove(folder)


def _remove(folder):
    """Remove a group as soon as the last of its killed processes is gone."""

    def removed():
        try:
            folder.rmdir()
        except OSError:
            return not folder.exists()
        return True

    until(removed)


def joining(group, *command):
    """The command that runs ``command`` in the group."""
    return ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *map(str, command)]


def kills(group):
    """How many processes of the group the kernel killed for memory."""
    text = (group / "memory.oom_control").read_text()
    return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
