"""Ranks: each worker of a launcher is a thin client, and all of a node share one parent."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from support.waiting import until
from warm_place import LAZYSNAP

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
LAUNCHER = """
import os, signal, subprocess, sys
ranks, restarts, *words = sys.argv[1:]
for restart in range(int(restarts) + 1):
    workers = [
        subprocess.Popen(words, env={**os.environ, "RANK": str(rank), "RESTART": "x"}, start_new_session=True)
        for rank in range(int(ranks))
    ]
    pid, status = os.waitpid(-1, 0)
    if status:
        for worker in workers:
            if worker.pid != pid: os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        if worker.pid != pid: worker.wait()
    if not status: break
sys.exit(os.waitstatus_to_exitcode(status) and 1)
"""
WORKER = """
import json, os, signal, sys, time
rank = os.environ["RANK"]
def starts(rank):
    try: return json.load(open(f"starts{rank}.json"))
    except OSError: return []
mine = starts(rank)
keys = ("PYTHONPATH", "PYTHON_EXEC", "LAZYSNAP_WARM", "LAZYSNAP_WARM_PARENT", "OMP_NUM_THREADS")
mine.append({
    "pid": os.getpid(), "parent": os.getppid(), "warm": "wave" in sys.modules, "unbuffered": sys.stdout.write_through,
    "leads": os.getsid(0) == os.getpgrp() == os.getpid(), "environ": {k: v for k, v in os.environ.items() if k in keys},
})
import wave
from lazysnap.warm.steps import Steps
Steps().reached(len(mine))
with open(f"new{rank}", "w") as file: json.dump(mine, file)
os.replace(f"new{rank}", f"starts{rank}.json")
while len(starts("0")) != len(starts("1")): pass
if len(mine) < 3:
    # Until the second process of the parent has begun: the next start is one of its.
    while len(mine) == 1 and len([1 for pid in os.listdir("/proc") if pid.isdigit() and is_of(pid)]) < 1: pass
    if rank == "1": os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
if "--wait" in sys.argv:
    open(f"ready{rank}.json", "w").write(str(os.getpid()))
    signal.pause()
""".replace(
    "rank = os.environ",
    """def is_of(pid):
    try:
        stat = open(f"/proc/{pid}/stat").read()
        return "lazysnap-warm" in stat and stat.rpartition(")")[2].split()[1] == str(os.getppid())
    except OSError: return False
rank = os.environ""",
    1,
)

MEETING = """
import os, signal, socket, sys
def processes(name):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try: stat = open(f"/proc/{pid}/stat").read()
        except OSError: continue
        state, parent, *_ = stat.rpartition(")")[2].split()
        if parent == str(os.getppid()) and name in stat and pid != str(os.getpid()): found.append(state)
    return found
is_warm = "wave" in sys.modules
if is_warm and os.environ["RANK"] == "1":
    with socket.socket() as connection:
        if connection.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))): sys.exit(1)
    open("met", "w").close()
import wave
if not is_warm:
    sys.modules["_lazysnap_warm"].record()
    while not processes("lazysnap-warm"): pass
    if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
if os.environ["RANK"] == "0":
    while "S" not in processes("(python"): pass  # the other rank was forked, and waits
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))) as server: server.accept()
"""
"""Rank 1 looks once for the store of rank 0, which listens only once rank 1 waits."""


def seen(place, count=3):
    """What the ranks saw at each start."""
    ranks = [place.read(f"starts{rank}.json") for rank in (0, 1)]
    assert [len(starts) for starts in ranks] == [count, count]
    return ranks


def assert_warm(ranks):
    for start, both in enumerate(zip(*ranks, strict=True)):
        assert [one["warm"] for one in both] == 2 * [start > 0]
        assert all(one["leads"] for one in both)
        assert len({one["parent"] for one in both}) == 1


@pytest.fixture
def launcher(place):
    worker = place.write("worker.py", WORKER)
    return [
        sys.executable,
        place.write("launcher.py", LAUNCHER),
        "2",
        "2",
        LAZYSNAP,
        "worker",
        "--",
        sys.executable,
        worker,
    ]


def test_workers_of_a_launcher_share_one_parent_and_start_again_warm(place, launcher):
    code, _, err = place.run(*launcher)
    assert code == 0, err
    assert_warm(seen(place))
    place.wait_until_gone()
    assert [path for path in place.directory.glob("lazysnap-warm/*") if path.is_dir()] == []


def test_when_the_launcher_is_killed_nothing_stays(place, launcher):
    process = place.start(*launcher, "--wait")
    for rank in (0, 1):
        until(lambda rank=rank: place.read(f"ready{rank}.json"))
    process.kill()
    process.wait()
    place.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_group_of_a_worker_ends_its_program(place, launcher, number):
    process = place.start(*launcher, "--wait")
    programs = [until(lambda rank=rank: place.read(f"ready{rank}.json")) for rank in (0, 1)]
    clients = [one for one in place.processes() if one.ppid() == process.pid and one.name() != "lazysnap-warm"]
    assert len(clients) == 2
    os.killpg(clients[0].pid, number)
    assert process.wait(60) == 1
    assert not {one.pid for one in place.processes()} & set(programs)
    place.wait_until_gone()


def test_a_warm_rank_begins_when_rank_0_listens(place):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "GROUP_RANK": "0", "MASTER_PORT": str(port)}
    words = [LAZYSNAP, "worker", "--", sys.executable, place.write("meeting.py", MEETING)]
    # A busy machine may let the time pass in which a rank waits.
    code, _, err = place.run(sys.executable, place.write("launcher.py", LAUNCHER), "2", "9", *words)
    assert code == 0, err
    assert (place.directory / "met").exists()
    place.wait_until_gone()


@pytest.mark.parametrize("way", ["run", "worker"])
def test_torchrun_starts_its_workers_again_warm(place, way):
    worker = place.write("worker.py", WORKER)
    words = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    if way == "run":
        words = [LAZYSNAP, "run", "--max-restarts", "0", "--", *words, worker]
    else:
        words += ["--no-python", LAZYSNAP, "worker", "--", sys.executable, "-u", worker]
    code, _, err = place.run(*words)
    assert code == 0, err
    ranks = seen(place)
    assert_warm(ranks)
    assert all(one["unbuffered"] and one["environ"]["OMP_NUM_THREADS"] == "1" for starts in ranks for one in starts)
    assert all(one["environ"]["PYTHONPATH"] == place.environ["PYTHONPATH"] for starts in ranks for one in starts)
    place.wait_until_gone()


def test_torchrun_itself_starts_again_warm(place):
    worker = place.write("worker.py", WORKER)
    words = [TORCHRUN, "--standalone", "--nproc-per-node", "2", worker]
    code, _, err = place.run(LAZYSNAP, "run", "--", *words)
    assert code == 0, err
    assert_warm(seen(place))
    assert err.count("the command ended with exit code 1") == 2
    place.wait_until_gone()


def test_the_path_of_an_interpreter_may_have_blanks_and_quotes(place):
    folder = place.directory / "it's mine"
    folder.mkdir()
    python = folder / "python3"
    python.symlink_to(os.path.realpath(sys.executable))
    program = "import os, subprocess; subprocess.run([os.environ['PYTHON_EXEC'], '-c', 'print(1)'], check=True)"

    code, out, err = place.warm(str(python), "-c", program)

    assert (code, out) == (0, "1\n"), err
    place.wait_until_gone()
