"""Who shares user and network with a job, and not its secret, gets nothing of it."""

import concurrent.futures
import contextlib
import os
import pathlib
import pwd
import select
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
from keeper_jobs import Job
from support.waiting import until
from test_strange_answers import proven

from lazysnap.cli import main
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import FormatError, KeeperError
from lazysnap.keeper.attach import attach
from lazysnap.keeper.heartbeat import Patience
from lazysnap.keeper.identity import ENVIRONMENT, JobIdentity, owner_secret
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.messages import prove
from lazysnap.keeper.neighbour import NeighbourMemory
from lazysnap.keeper.protocol import AskInventory
from lazysnap.links.secret import Secret
from lazysnap.memory.arena import Slot
from lazysnap.topology import Team

OTHERS = Secret("ab" * 32)
WAIT_S = 60.0


HOME_OF_TESTS = """
import pwd
of_user = pwd.getpwuid
pwd.getpwuid = lambda uid: pwd.struct_passwd((*of_user(uid)[:5], {home!r}, "/bin/sh"))
"""

SILENT = """
import os, select, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(bytes.fromhex(sys.argv[1]).decode())
listener.listen()
print("bound", flush=True)
while not select.select([0], [], [], 0.02)[0]:
    pass
if not sys.stdin.readline():
    sys.exit()
from lazysnap.keeper.messages import prove
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import Welcome
from lazysnap.links.secret import Secret
connection = Connection(listener.accept()[0])
secret = Secret(os.environ["LAZYSNAP_KEEPER_KEY"])
prove(connection, secret, lambda: bool(select.select([connection.sock], [], [])), is_server=True)
connection.receive()
connection.send(Welcome(os.getpid()))
sys.stdin.read()
"""
"""Runs all the time at the keeper's name, silent until it is given a line; then it answers with the key it has."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home directory of the user database, here and in what is started from here."""
    home, site = tmp_path / "home", tmp_path / "site"
    site.mkdir()
    home.mkdir()
    (site / "sitecustomize.py").write_text(HOME_OF_TESTS.format(home=str(home)))
    of_user = pwd.getpwuid
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd((*of_user(uid)[:5], str(home), "/bin/sh")))
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ['PYTHONPATH']}")
    return home


@pytest.fixture
def no_secret(home, tmp_path, monkeypatch):
    """A user of whom nothing is known yet: where its files go."""
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return home / ".local" / "state" / "lazysnap" / "secret"


@contextlib.contextmanager
def silent_at(identity, environment):
    """A process that has the keeper's name, and runs."""
    arguments = [sys.executable, "-c", SILENT, identity.address.encode().hex()]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
    ) as process:
        try:
            assert process.stdout.readline() == b"bound\n"
            yield process
        finally:
            process.kill()


def reader(connection):
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return lambda: bool(poll.poll(1000 * WAIT_S))


@pytest.mark.parametrize("greets", [True, False])
def test_a_process_without_the_secret_is_shown_no_memory(job, greets):
    """It finds the name in the list of the network's sockets."""
    trainer = job.trainer()
    trainer.capture(step=1)
    with contextlib.closing(try_connect(job.identity)) as connection:
        connection.sock.settimeout(WAIT_S)
        if greets:
            with pytest.raises((KeeperError, OSError)):
                prove(connection, OTHERS, reader(connection))
        else:
            connection.send(AskInventory(local_rank=0))
        # Nothing comes but the keeper's half of the greeting, before the end.
        with contextlib.suppress(ConnectionError):
            while (found := socket.recv_fds(connection.sock, 1 << 16, 16))[0]:
                assert found[1] == []
                assert len(found[0]) < 200

    assert trainer.capture(step=2)
    with contextlib.closing(NeighbourMemory(job.identity, 0, WAIT_S)) as memory:
        assert [entry.step for entry in memory.inventory.entries] == [1, 2]


def test_who_has_the_name_of_a_keeper_and_not_the_secret_is_told_nothing_and_named(tmp_path):
    level = PersistentLevel(str(tmp_path / "a"), storage_options={"password": "opensesame"})
    config = SnapshotConfig(job_id=str(tmp_path), levels=(level,))
    identity = JobIdentity.from_config(config)
    heard = b""

    def listen(listener):
        nonlocal heard
        sock, _ = listener.accept()
        with sock, contextlib.suppress(ConnectionError):
            sock.sendall(b"lazykeep\x00\x01" + bytes(64))  # as one who has it would begin
            while data := sock.recv(1 << 16):
                heard += data

    with socket.socket(socket.AF_UNIX) as listener, concurrent.futures.ThreadPoolExecutor(1) as squatter:
        listener.bind(identity.address)
        listener.listen()
        listening = squatter.submit(listen, listener)
        with pytest.raises(KeeperError, match="does not have the secret"):
            attach(identity, config, Team())
        listening.result(WAIT_S)

    assert heard.startswith(b"lazykeep")
    assert b"opensesame" not in heard
    assert len(heard) < 200


def test_a_name_cannot_be_told_without_the_secret(monkeypatch):
    addresses = []
    for secret in ("one", "other"):
        monkeypatch.setenv(ENVIRONMENT, secret)
        addresses.append(JobIdentity.from_config(SnapshotConfig(job_id="a")).address)

    assert len(set(addresses)) == 2


def test_who_reads_memory_can_neither_write_it_nor_change_its_size(job):
    trainer = job.trainer()
    trainer.capture(step=1)

    with contextlib.closing(NeighbourMemory(job.identity, 0, WAIT_S)) as memory:
        [entry] = memory.inventory.entries
        entry.slot.image[0] ^= 1
        entry.slot.discard()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(entry.slot.fd, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(entry.slot.fd, 0)
        del entry
    assert [found[2] for found in trainer.inventory()] == [True]


def test_memory_whose_size_its_sender_could_change_is_not_mapped():
    """Else whoever reads it could be killed by who makes it smaller."""
    with contextlib.closing(Slot.create(4096, 4096)) as slot:
        with pytest.raises(PermissionError):
            os.ftruncate(slot.fd, 0)
        copy = os.memfd_create("copy")
        os.pwrite(copy, os.pread(slot.fd, slot.size_bytes, 0), 0)
        with pytest.raises(FormatError, match="size"):
            Slot.attach(copy)


def test_the_secret_is_drawn_once_for_a_user_and_only_the_user_can_read_it(no_secret):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = {future.result() for future in [pool.submit(owner_secret) for _ in range(40)]}

    assert found == {no_secret.read_text()}
    assert no_secret.stat().st_mode & 0o777 == 0o600
    assert list(no_secret.parent.iterdir()) == [no_secret]


@pytest.mark.parametrize("trouble", ["no directory", "others can read it", "cut off", "a link", "another user's"])
def test_a_secret_that_cannot_be_used_is_replaced_by_one_beside_temporary_files(no_secret, home, tmp_path, trouble):
    if trouble == "no directory":
        (home / ".local").write_text("in the way")
    else:
        owner_secret()
    if trouble == "others can read it":
        no_secret.chmod(0o644)
    elif trouble == "cut off":
        no_secret.write_text("")
    elif trouble == "a link":
        no_secret.symlink_to(no_secret.rename(tmp_path / "elsewhere"))
    elif trouble == "another user's":
        if os.geteuid():
            pytest.skip("only root can make a file another user's")
        os.chown(no_secret, 65534, -1)

    found = owner_secret()

    assert found == owner_secret() == (tmp_path / f"lazysnap-{os.getuid()}" / "secret").read_text()


def test_a_home_that_can_be_written_later_on_does_not_change_the_secret(no_secret, home, tmp_path):
    (home / ".local").write_text("in the way")
    first = owner_secret()
    (home / ".local").unlink()

    assert owner_secret() == first
    assert not no_secret.exists()


def test_without_any_place_for_a_secret_there_is_no_keeper_and_the_way_out_is_named(no_secret, home, tmp_path):
    for path in (home / ".local", tmp_path / f"lazysnap-{os.getuid()}"):
        path.write_text("in the way")
    identity = JobIdentity.from_config(config := SnapshotConfig(job_id="a"))

    with pytest.raises(KeeperError, match=ENVIRONMENT):
        attach(identity, config, Team())


def test_without_the_variable_all_processes_of_a_user_find_the_keeper(no_secret, tmp_path, capsys):
    job = Job(str(tmp_path / "a"), tmp_path)
    try:
        job.trainer(levels=[job.level()]).capture(step=1)
        keeper = job.keeper_pid()
        assert no_secret.read_text() not in pathlib.Path(f"/proc/{keeper}/cmdline").read_text()
        job.trainers[0].kill()
        with contextlib.closing(proven(job.identity)):
            assert main(["stop", job.job_id]) == 0
        assert f"keeper {keeper} ended" in capsys.readouterr().out
    finally:
        job.close()


def test_another_home_in_the_environment_finds_the_same_keeper(no_secret, tmp_path):
    elsewhere = {"HOME": str(tmp_path / "b"), "XDG_STATE_HOME": str(tmp_path / "c")}
    job = Job(str(tmp_path / "a"), tmp_path)
    try:
        first = job.trainer()
        first.capture(step=1)
        keeper = job.keeper_pid()
        second = job.start(environment=elsewhere)
        assert second.connect()["error"] == "JobBusy"
        first.kill()

        third = job.trainer(environment=elsewhere)

        assert job.keeper_pid() == keeper
        assert [found[2] for found in third.inventory()] == [True]
    finally:
        job.close()


def test_who_has_the_name_of_a_keeper_and_says_nothing_is_not_waited_for_though_it_runs(tmp_path):
    config = SnapshotConfig(job_id=str(tmp_path), io_timeout_s=0.5)
    identity = JobIdentity.from_config(config)
    patience = Patience(config.io_timeout_s)

    with silent_at(identity, {}) as squatter, pytest.raises(KeeperError) as refused:
        attach(identity, config, Team(), patience=patience)

    assert f"process {squatter.pid} has the name of the keeper" in str(refused.value)
    assert "did not prove within 0.5 s (io_timeout_s) that it is a keeper of this user" in str(refused.value)
    assert "kill -CONT" not in str(refused.value)
    assert patience.extend(0.0) == 0.0


def test_a_keeper_that_is_slow_to_prove_itself_is_waited_for(tmp_path):
    """It can be seen to have been started with the secret."""
    config = SnapshotConfig(job_id=str(tmp_path), io_timeout_s=1.0)
    identity = JobIdentity.from_config(config)

    with silent_at(identity, identity.environment) as keeper, concurrent.futures.ThreadPoolExecutor(1) as pool:
        attached = pool.submit(attach, identity, config, Team())
        concurrent.futures.wait([attached], 3 * config.io_timeout_s)
        keeper.stdin.write(b"go on\n")
        keeper.stdin.flush()
        connection, _ = attached.result(WAIT_S)
        with contextlib.closing(connection):
            assert connection.peer_pid == keeper.pid


def test_a_keeper_that_is_stopped_before_it_proves_itself_is_named_with_the_way_to_go_on(job):
    trainer = job.trainer()
    trainer.capture(step=1)  # without any it would end with its trainer
    keeper = job.keeper_pid()
    os.kill(keeper, signal.SIGSTOP)
    config = SnapshotConfig(job_id=job.job_id, io_timeout_s=0.5)

    with pytest.raises(KeeperError, match=f"did not answer .* `kill -CONT {keeper}`"):
        attach(job.identity, config, Team())


def test_a_secret_deleted_in_mid_run_stops_nothing_and_the_next_start_has_a_keeper_of_its_own(no_secret, tmp_path):
    job = Job(str(tmp_path / "a"), tmp_path)
    try:
        first = job.trainer()
        keeper = job.keeper_pid()
        no_secret.unlink()
        assert first.capture(step=1)
        first.take_events()
        first.cut()
        assert until(lambda: "KeeperReady" in [name for name, _ in first.take_events()])
        assert first.capture(step=2)

        other = Job(job.job_id, tmp_path)
        second = other.trainer()

        assert second.inventory() == []
        assert other.keeper_pid() not in (keeper, None)
        assert first.capture(step=3)
        other.close()
    finally:
        job.close()
