"""Real trainers and keepers, killed at different moments; nothing is left of them in the end."""

import contextlib
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys

import pytest
from support.catalogue import inventory_of
from support.listing import files_below
from support.stored import steps_at
from support.waiting import stop, until

from lazysnap.core.messages import PROTOCOL
from lazysnap.errors import KeeperError
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import Question
from lazysnap.levels.store import open_storage


def starts_at(url):
    return [entry.start for entry in inventory_of(open_storage(str(url))).entries]


def wait_for_end(sock):
    with contextlib.suppress(ConnectionError):
        while sock.recv(1000):  # it may be told of our version
            pass


def stat_of(pid):
    """State, parent, process group and session of a process."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:4]


def is_running(pid):
    try:
        return stat_of(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_start_of_a_keeper_that_hangs_does_not_hold_up_a_fork():
    """Workers of a data loader are forked by the training thread; a keeper is started beside it."""
    script = (
        "import os\n"
        "from lazysnap.keeper import launch\n"
        "launch._FORK_WAIT_S = 0.01\n"
        "for is_free in (False, True):\n"
        "    lock = launch._starting\n"
        "    if not is_free:\n"
        "        lock.acquire()\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os._exit(int(launch._starting.locked()))\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    assert lock.locked() is not is_free\n"
        "    if not is_free:\n"
        "        lock.release()\n"
        "print('forked')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    run = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True, timeout=60)

    assert run.stdout == "forked\n", run.stderr


@pytest.mark.slow
def test_a_killed_trainers_newest_capture_waits_in_memory_for_the_next_trainer(job):
    first = job.trainer()
    for step in (1, 2, 3, 4):
        first.capture(step=step)
    first.kill()

    second = job.trainer(reserve=0)

    assert [step for step, *_ in second.inventory()] == [2, 3, 4]
    assert all(whole for _, _, whole, _ in second.inventory())


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["linger is over", "goodbye", "SIGTERM"])
def test_a_keeper_that_still_stores_what_it_holds_serves_the_next_trainer(job, tmp_path, ending):
    """Its level hangs: without the next trainer it would wait for an hour."""
    passed = tmp_path / "passed"
    environment = {"LAZYSNAP_FAULT": "level.store.begin:1:hang", "LAZYSNAP_FAULT_LOG": str(passed)}
    settings = {"levels": [job.level()], "linger_s": 0.01 if ending == "linger is over" else 600.0}
    first = job.trainer(environment=environment, **settings)
    for step in (1, 2):
        first.capture(step=step)
    keeper = job.keeper_pid()
    if ending == "goodbye":
        first.process.stdin.write('["goodbye", {}]\n')
        first.process.stdin.flush()
    else:
        first.kill()
    if ending == "SIGTERM":
        os.kill(keeper, signal.SIGTERM)
    assert until(lambda: "keeper.draining" in passed.read_text())
    first.kill()

    second = job.trainer(reserve=0, linger_s=600.0)

    assert job.keeper_pid() == keeper
    assert [step for step, *_ in second.inventory()] == [1, 2]
    assert second.reserve(count=3) == 3
    assert second.begin_start(run_id="ab" * 8)
    assert second.capture(step=3)


@pytest.mark.slow
def test_who_only_reads_gets_no_pages_for_captures_until_it_asks_for_them(job):
    first = job.trainer()
    first.capture(step=1)
    first.kill()

    second = job.trainer(reserve=0)
    assert [whole for _, _, whole, _ in second.inventory()] == [True]
    second.join_populating()

    assert second.slots() == 0
    assert second.reserve(count=3) == 3


@pytest.mark.slow
def test_a_capture_in_progress_dies_with_its_trainer(job):
    first = job.trainer()
    first.capture(step=1)
    first.begin(step=2)
    first.kill()

    second = job.trainer(reserve=0)

    assert [step for step, *_ in second.inventory()] == [1]


@pytest.mark.slow
def test_ctrl_c_and_a_kill_of_the_whole_process_group_leave_the_keeper(job):
    first = job.trainer()
    first.capture(step=7)
    keeper = job.keeper_pid()
    assert str(first.process.pid) not in stat_of(keeper)
    os.killpg(first.process.pid, signal.SIGINT)
    first.process.wait(60)
    os.kill(keeper, signal.SIGINT)

    assert [entry[0] for entry in job.trainer(reserve=0).inventory()] == [7]
    assert job.keeper_pid() == keeper


def test_a_trainers_death_makes_its_newest_whole_capture_durable_even_behind_a_torn_one(job):
    """The capture that was being streamed to storage when the trainer died does not take the older one with it."""
    level = job.level(every_n_steps=1)
    first = job.trainer(levels=[level])
    first.capture(step=1)
    first.begin(step=2, must=True)
    assert until(lambda: any(".tmp" in path.name for path in files_below(job.root / "level")))
    first.kill()

    assert until(lambda: steps_at(level["url"]) == [1])


@pytest.mark.slow
def test_what_a_trainer_asked_a_keeper_to_store_is_stored_by_the_next_one(job):
    """The trainer's state says so."""
    first = job.trainer(levels=[job.level(every_n_steps=1000)])
    keeper = job.keeper_pid()
    first.begin(step=1, must=True)
    os.kill(keeper, signal.SIGKILL)
    assert until(lambda: job.keeper_pid() not in (None, keeper))
    assert until(lambda: first.slots() == 3)
    first.commit()

    assert first.wait_durable(step=1, timeout_s=60)
    assert until(lambda: first.held() == 0)


@pytest.mark.slow
def test_bytes_that_rest_in_memory_get_checksums(job):
    first = job.trainer()
    first.capture(step=1)
    first.kill()

    def rested():
        trainer = job.trainer(reserve=0)
        found = trainer.inventory()
        trainer.close()
        return found and found[0][3]

    assert until(rested)


@pytest.mark.slow
def test_goodbye_makes_the_newest_capture_durable_and_leaves_nothing(job):
    level = job.level(every_n_steps=100)
    first = job.trainer(levels=[level])
    first.capture(step=5)
    assert first.goodbye()

    assert until(job.is_gone)
    assert steps_at(level["url"]) == [5]
    assert files_below(job.root / "level", ".*") == []


@pytest.mark.slow
def test_a_lone_keeper_leaves_when_its_linger_time_is_over(job):
    first = job.trainer(linger_s=0.3)
    first.capture(step=1)
    first.kill()

    assert until(job.is_gone)


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [0, 3])
def test_a_keeper_without_a_whole_capture_does_not_linger(job, reserve):
    first = job.trainer(reserve=reserve, linger_s=100)
    if reserve:
        first.begin(step=1)
    first.kill()

    assert until(job.is_gone)


@pytest.mark.slow
def test_a_keeper_stays_for_its_captures_after_a_visitor_that_made_none(job):
    first = job.trainer(linger_s=100)
    first.capture(step=1)
    first.kill()
    keeper = job.keeper_pid()
    visitor = job.trainer(reserve=0, linger_s=100)
    assert [entry[0] for entry in visitor.inventory()] == [1]
    visitor.abandon()

    assert [entry[0] for entry in job.trainer(reserve=0).inventory()] == [1]
    assert job.keeper_pid() == keeper


@pytest.mark.slow
def test_a_level_that_was_away_at_the_death_gets_the_capture_when_the_keeper_leaves(job):
    blocker = job.root / "level"
    blocker.write_text("not a directory")
    level = job.level()
    first = job.trainer(levels=[level], linger_s=5)
    first.capture(step=4)
    first.begin(step=5)
    keeper = job.keeper_pid()
    first.kill()
    blocker.unlink()
    assert until(job.is_gone)

    assert until(lambda: not is_running(keeper))
    assert steps_at(level["url"]) == [4]


@pytest.mark.slow
def test_sigterm_makes_the_keeper_persist_and_leave(job):
    level = job.level(every_n_steps=100)
    first = job.trainer(levels=[level], linger_s=100)
    first.capture(step=3)
    keeper = job.keeper_pid()
    first.kill()
    os.kill(keeper, signal.SIGTERM)

    assert until(job.is_gone)
    assert steps_at(level["url"]) == [3]


@pytest.mark.slow
def test_a_broken_connection_does_not_double_the_slots(job):
    """Two slots of one memory would let a trainer overwrite the newest capture that it believes to spare."""
    first = job.trainer()
    first.capture(step=1)
    assert first.cut()
    assert until(lambda: first.slots() == 3)

    assert first.inodes() == 3
    assert [entry[0] for entry in first.inventory()] == [1]
    first.kill()
    assert [entry[0] for entry in job.trainer(reserve=0).inventory()] == [1]


@pytest.mark.slow
def test_a_second_trainer_of_a_running_job_is_told_who_runs(job):
    first = job.trainer()
    error = job.start().connect()

    assert error["error"] == "JobBusy"
    assert f"process {first.process.pid}" in error["text"]


@pytest.mark.slow
def test_a_second_trainer_does_not_come_between_a_trainer_and_its_next_keeper(job, tmp_path):
    log = tmp_path / "points"
    first = job.trainer()
    first.capture(step=1)
    second = job.start(environment={"LAZYSNAP_FAULT_LOG": str(log)})
    second.process.stdin.write('["connect", {}]\n')
    second.process.stdin.flush()
    assert until(lambda: log.exists() and "client.refused" in log.read_text())
    stop(first.process.pid)
    os.kill(job.keeper_pid(), signal.SIGKILL)
    until(lambda: log.read_text().count("client.no_start_yet") >= 5)  # it finds no keeper, again and again
    assert "client.start_keeper" not in log.read_text()
    first.process.send_signal(signal.SIGCONT)

    assert "JobBusy" in second.process.stdout.readline()
    assert until(lambda: first.slots() == 3, first.why_not)
    assert [entry[0] for entry in first.inventory()] == [1]


@pytest.mark.slow
def test_a_worker_that_outlives_its_killed_trainer_does_not_hide_the_death(job):
    first = job.trainer()
    first.capture(step=1)
    worker = first.fork()
    first.kill()
    try:
        assert [entry[0] for entry in job.trainer(reserve=0).inventory()] == [1]
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_a_forked_worker_does_not_disturb_its_trainers_keeper(job):
    first = job.trainer()
    os.kill(first.fork(), signal.SIGKILL)
    first.capture(step=1)

    assert [entry[0] for entry in first.inventory()] == [1]


@pytest.mark.slow
def test_starters_that_race_end_with_one_keeper(job):
    """Of trainers that start at once one is served; the others find it busy, not a keeper of their own."""
    trainers = [job.start() for _ in range(3)]
    for trainer in trainers:
        trainer.process.stdin.write('["connect", {}]\n')
        trainer.process.stdin.flush()
    answers = [trainer.process.stdout.readline() for trainer in trainers]

    assert sum("JobBusy" in answer for answer in answers) == 2, answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<IHH", 1 << 31, PROTOCOL, 0),
        struct.pack("<IHH", 2, PROTOCOL, 0) + b"[]",
    ],
)
def test_garbage_on_the_socket_costs_only_that_connection(job, garbage):
    first = job.trainer()
    first.capture(step=1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(60)
        stranger.connect(str(job.identity.files.socket_path))
        stranger.sendall(10 * garbage)
        wait_for_end(stranger)
    with contextlib.closing(try_connect(job.identity)) as asking, contextlib.suppress(OSError, KeeperError):
        asking.send(Question(about="memory"))
        os.write(asking.fileno(), garbage)
        while asking.receive() is not None:
            asking.wait(60)

    assert [entry[0] for entry in first.inventory()] == [1]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect_even_where_the_directory_lets_it(runtime_directory, make_job, monkeypatch):
    """The directory keeps other users out; behind it the keeper checks the user of each connection."""
    monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", runtime_directory)  # other tests use that of the session
    job = make_job()
    first = job.trainer()
    stranger = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(60)
try:
    sock.connect(sys.argv[1])
    print(sock.recv(10))
except PermissionError as error:
    print("refused by the directory")
"""
    socket_path = job.identity.files.socket_path
    arguments = [sys.executable, "-c", stranger, str(socket_path)]

    assert subprocess.check_output(arguments, text=True, timeout=60) == "refused by the directory\n"
    socket_path.chmod(0o777)
    socket_path.parent.chmod(0o755)
    try:
        assert subprocess.check_output(arguments, text=True, timeout=60) == "b''\n"
    finally:
        socket_path.parent.chmod(0o700)
    assert first.capture(step=1)
    assert [entry[0] for entry in first.inventory()] == [1]


@pytest.mark.slow
def test_slots_of_a_new_size_never_cost_the_newest_capture(job):
    first = job.trainer()
    first.capture(step=1)
    assert first.reserve(count=3, size=30_000_000) == 3
    assert [entry[0] for entry in first.inventory()] == [1]
    first.begin(step=2)
    assert [entry[0] for entry in first.inventory()] == [1]
    first.commit()

    assert until(lambda: first.slots() == 3)
    assert [entry[0] for entry in first.inventory()] == [2]


@pytest.mark.slow
def test_slots_of_a_size_that_were_there_before_are_made_again(job):
    first = job.trainer(reserve=2)
    first.capture(step=1)
    assert first.reserve(count=2, size=30_000_000) == 2
    first.capture(step=2)
    first.kill()

    second = job.trainer(reserve=2)
    assert second.reserve(count=2, size=30_000_000) == 2


@pytest.mark.slow
def test_a_slot_that_is_returned_although_it_is_wanted_is_made_again(job):
    first = job.trainer(reserve=2)

    assert first.return_all() == 0
    assert until(lambda: first.slots() == 2)


@pytest.mark.slow
def test_what_a_trainer_counts_on_stays_though_captures_have_another_size_now(job):
    """Of several ranks the newest that all have may be an older one."""
    first = job.trainer(reserve=3, kept=2)
    for step in (1, 2, 3):
        first.capture(step=step)
    assert first.reserve(count=3, size=30_000_000) == 3
    assert [entry[0] for entry in first.inventory()] == [2, 3]
    first.capture(step=4)

    assert until(lambda: first.slots() == 4), "step 2 goes as soon as step 4 is whole"
    assert [entry[0] for entry in first.inventory()] == [3, 4]
    first.capture(step=5)
    assert until(lambda: first.slots() == 3)
    assert [entry[0] for entry in first.inventory()] == [4, 5]


@pytest.mark.slow
def test_slots_beyond_the_bound_are_refused_with_the_bytes_needed_and_allowed(job):
    first = job.trainer(reserve=0, max_bytes=200_000)
    assert first.reserve(count=3) == 0

    text = first.refused()
    assert "344064 bytes" in text
    assert "200000" in text


@pytest.mark.slow
def test_a_torn_capture_that_was_required_does_not_end_persistence(job):
    level = job.level()
    first = job.trainer(levels=[level])
    first.begin(step=1, must=True)
    first.discard()
    assert until(lambda: first.held() == 0)
    first.capture(step=2, must=True)

    assert first.wait_durable(step=2, timeout_s=60)


@pytest.mark.slow
def test_the_newest_capture_comes_to_every_level_even_if_the_step_repeats(job):
    """A run resumed from an older step passes steps again that its levels have already: that is another start."""
    levels = [job.level("one"), job.level("two", every_n_steps=100)]
    first = job.trainer(levels=levels)
    first.capture(step=5)
    assert first.store()
    before = {level["url"]: starts_at(level["url"]) for level in levels}
    first.begin_start(run_id="ab" * 8)
    first.capture(step=5)
    assert first.store()

    for level in levels:
        assert set(starts_at(level["url"])) - set(before[level["url"]])


@pytest.mark.slow
def test_a_keeper_that_hangs_is_noticed_by_deadline_and_never_blocks_captures(job):
    first = job.trainer(levels=[job.level()], timeout_s=1.0)
    first.capture(step=0)
    keeper = job.keeper_pid()
    stop(keeper)
    try:
        assert not first.store(timeout_s=0.2)
        assert first.inventory()["error"] == "KeeperError"
        for step in range(1, 200):
            assert first.capture(step=step, must=True)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert first.store()


@pytest.mark.slow
def test_a_keeper_holds_neither_torch_nor_numpy_nor_descriptors_of_its_trainer(job):
    job.trainer()
    keeper = job.keeper_pid()
    maps = pathlib.Path(f"/proc/{keeper}/maps").read_text()
    links = []
    for link in pathlib.Path(f"/proc/{keeper}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one that was just closed
            links.append(os.readlink(link))

    assert "torch" not in maps
    assert "numpy" not in maps
    assert not [link for link in links if link.startswith("pipe:")]
    assert os.readlink(f"/proc/{keeper}/cwd") == "/"


def test_goodbye_right_after_the_start_leaves_no_keeper_behind(job):
    """The keeper that is still being started when its trainer leaves has no trainer to wait for."""
    trainer = job.start(linger_s=100)
    trainer.start()
    assert trainer.goodbye()

    assert until(job.is_gone)
