"""Slots take no memory that the kernel would kill training for: not of the machine, and not of a control group."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from support.groups import joining, kills, memory_group
from support.programs import TWO_RANKS

from lazysnap.memory.available import available_bytes

MIB = 1 << 20
HERE = pathlib.Path(__file__).parent
AVAILABLE = "from lazysnap.memory.available import available_bytes; print(available_bytes())"


def run(group, *arguments, code=0, **variables):
    """What a Python program in the group prints."""
    environment = {**os.environ, **variables}
    command = joining(group, sys.executable, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == code, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def tree(root, *, cgroup, mountinfo, files):
    """A directory that looks like ``/`` of a process in these groups, on a machine with 64 GiB available."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {64 << 20} kB\n")
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(root)


V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def v2(folder, *, current, limit="max", high="max", stat="inactive_file 0\nactive_file 0"):
    names = {"memory.current": str(current), "memory.max": str(limit), "memory.high": str(high), "memory.stat": stat}
    return {f"sys/fs/cgroup{folder}/{name}": f"{text}\n" for name, text in names.items()}


def test_the_least_of_all_nested_groups_counts(tmp_path):
    files = v2("/job", current=900 * MIB, limit=1000 * MIB) | v2("/job/step", current=10 * MIB, limit=700 * MIB)
    root = tree(tmp_path, cgroup="0::/job/step\n", mountinfo=V2_MOUNT.format(root="/"), files=files)

    assert available_bytes(root) == 100 * MIB


def test_a_group_that_would_be_slowed_down_is_full(tmp_path):
    files = v2("/job", current=100 * MIB, limit=1000 * MIB, high=300 * MIB)
    root = tree(tmp_path, cgroup="0::/job\n", mountinfo=V2_MOUNT.format(root="/"), files=files)

    assert available_bytes(root) == 200 * MIB


def test_pages_of_files_are_not_counted_as_used(tmp_path):
    stat = f"inactive_file {40 * MIB}\nactive_file {20 * MIB}"
    files = v2("/job", current=100 * MIB, limit=200 * MIB, stat=stat)
    root = tree(tmp_path, cgroup="0::/job\n", mountinfo=V2_MOUNT.format(root="/"), files=files)

    assert available_bytes(root) == 150 * MIB


@pytest.mark.parametrize("path", ["/", "/../other", "/docker/abc"])
def test_a_container_that_sees_its_own_group_mounted_finds_its_limit(tmp_path, path):
    mounted = "/docker/abc" if path == "/docker/abc" else "/"
    files = v2("", current=100 * MIB, limit=300 * MIB)
    root = tree(tmp_path, cgroup=f"0::{path}\n", mountinfo=V2_MOUNT.format(root=mounted), files=files)

    assert available_bytes(root) == 200 * MIB


def test_version_1_counts_inner_groups_and_knows_no_limit(tmp_path):
    folder = "sys/fs/cgroup/memory/job"
    files = {
        f"{folder}/memory.limit_in_bytes": f"{500 * MIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{300 * MIB}\n",
        f"{folder}/memory.stat": f"inactive_file 0\nactive_file 0\ntotal_inactive_file {80 * MIB}\n",
        f"{folder}/step/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/step/memory.usage_in_bytes": f"{250 * MIB}\n",
        f"{folder}/step/memory.stat": "inactive_file 0\nactive_file 0\n",
    }
    cgroup = "4:memory:/job/step\n3:cpu:/\n0::/\n"
    root = tree(tmp_path, cgroup=cgroup, mountinfo=V1_MOUNT.format(root="/"), files=files)

    assert available_bytes(root) == 280 * MIB


def test_without_any_group_the_machine_counts(tmp_path):
    assert available_bytes(tree(tmp_path, cgroup="", mountinfo="", files={})) == 64 << 30


@pytest.mark.parametrize("inner", [False, True])
def test_a_real_group_is_seen_from_inside(inner):
    with memory_group(700 * MIB, inner=inner) as group:
        assert 500 * MIB < int(run(group, "-c", AVAILABLE)) <= 700 * MIB


@pytest.mark.slow
def test_ranks_that_ask_at_once_are_given_what_there_is_and_no_more():
    """1,200 MiB with 256 of them left to others hold three slots of 275 MiB; eight ranks ask."""
    with memory_group(1200 * MIB) as group:
        assert int(run(group, HERE / "asking.py", 275 * MIB)) == 3
        assert kills(group) == 0


@pytest.mark.slow
def test_a_training_whose_group_cannot_hold_its_slots_resumes_from_files_after_sigkill(tmp_path):
    """It takes 250 MB of weights, gradients and optimizer state itself; three slots of 190 MB do not fit as well."""
    with memory_group(900 * MIB, inner=True) as group:
        whole = run(group, HERE / "limited_training.py", tmp_path / "whole", 4000, 4).split()
        killed = run(group, HERE / "limited_training.py", tmp_path / "level", 4000, 4, 3, code=-signal.SIGKILL).split()
        resumed = run(group, HERE / "limited_training.py", tmp_path / "level", 4000, 4).split()

        assert whole[:2] == ["fresh", "files"]
        assert killed == ["fresh", "files", "killed"]
        assert resumed == ["memory:3", "files", *whole[2:]]
        assert kills(group) == 0


@pytest.mark.slow
def test_ranks_of_one_group_that_cannot_hold_all_slots_are_captured_into_files(tmp_path):
    with memory_group(1500 * MIB, inner=True) as group:
        output = run(group, *TWO_RANKS, HERE / "limited_training.py", tmp_path, 4000, 4).split()

        assert output.count("files") == 2
        assert output.count("refused") == 0
        assert kills(group) == 0


@pytest.mark.slow
def test_memory_that_loading_took_once_is_given_to_slots(tmp_path):
    """500 MiB were taken before training; three slots of 32 MB fit into what is free now, not into it without these."""
    with memory_group(900 * MIB, inner=True) as group:
        output = run(group, HERE / "limited_training.py", tmp_path, 2000, 4, LOADED=str(500 * MIB)).split()

        assert output[:2] == ["fresh", "memory"]
        assert kills(group) == 0
