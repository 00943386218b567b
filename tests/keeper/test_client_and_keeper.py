"""A trainer's client and a real keeper process."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.image import Image
from support.keepers import keeper_of
from support.waiting import TIMEOUT_S, stop, until

from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import Farewell, JobSettings, LevelSettings, MemoryWish, NamedStep, PeerAddress, StepKey
from lazysnap.errors import KeeperError
from lazysnap.keeper import trainer_link
from lazysnap.keeper.asking import NeighbourMemory, ask
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import Question
from lazysnap.memory.slot_choice import choose_slot
from lazysnap.ranks.discovery import discover_keepers
from lazysnap.ranks.world import World
from lazysnap.shard.manifest import CaptureMeta

RUN = "00000000000000aa"
START = 5
WISH = MemoryWish(num_slots=3, meta_bytes=4096, image_bytes=1 << 16)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def runtime(runtime_directory, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", runtime_directory)


class Training:
    """One trainer, in this process."""

    def __init__(self, directory, io_timeout_s=TIMEOUT_S):
        self.identity = JobIdentity.from_config(SnapshotConfig(job_id=str(directory)))
        self.client = KeeperClient(self.identity, 0, linger_s=60.0, io_timeout_s=io_timeout_s)
        level = LevelSettings(str(directory / "level"), every_n_steps=1000)
        self.job = JobSettings(run=RUN, levels=(level,))
        self.start = 0

    def begin(self, start=START, step=-1):
        """Connect, get memory, and begin a start."""
        self.client.connect(TIMEOUT_S)
        self.client.ask_memory(WISH)
        self.start = start
        self.client.begin_start(self.job, start, step)
        self.wait(lambda _: len(self.client.slots()) == WISH.num_slots)
        return self

    def capture(self, step):
        image = Image(step)
        views = [slot.view() for slot in self.client.slots()]
        chosen = choose_slot(views, 1, image_bytes=image.size_bytes, meta_bytes=4096)
        [slot] = [slot for slot in self.client.slots() if slot.slot_id == chosen.slot_id]
        meta = CaptureMeta(RUN, f"{self.start:016x}", step, 0, 1, 1).to_bytes()
        sequence = self.client.next_sequence()
        slot.begin(self.start, step, sequence=sequence, image_bytes=image.size_bytes, meta=meta)
        self.client.wake(step)
        slot.image[: image.size_bytes] = image.view(0, image.size_bytes)[: image.size_bytes]
        slot.commit(copied_ns=1)

    def wait(self, is_true):
        assert self.client.wait(is_true, TIMEOUT_S), self.client.state

    def store(self, step):
        """Have a step stored at the level, and wait for it."""
        self.client.require(step)
        self.wait(lambda _: self.client.is_complete(step, 0))

    def steps_in_memory(self):
        """The steps of the captures that the keeper holds, each with its bytes compared."""
        steps = []
        for entry in self.client.memory(TIMEOUT_S).entries:
            image = Image(entry.step)
            assert bytes(entry.slot.read(0, image.size_bytes)) == bytes(image.view(0, image.size_bytes))
            steps.append(entry.step)
        return sorted(steps)


@pytest.fixture
def make_training(tmp_path):
    trainings = []

    def make(**settings):
        trainings.append(Training(tmp_path, **settings))
        return trainings[-1]

    yield make
    for training in trainings:
        training.client.leave(Farewell.LEFT, 0.0)
    while (pid := keeper_of(JobIdentity.from_config(SnapshotConfig(job_id=str(tmp_path))))) is not None:
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@pytest.fixture
def training(make_training):
    return make_training()


def is_gone(training):
    files = training.identity.files
    return keeper_of(training.identity) is None and not files.socket_path.exists()


def test_a_capture_is_stored_and_the_keeper_goes_when_the_training_is_over(training):
    training.begin()
    assert training.client.keeper_pid == keeper_of(training.identity)
    training.capture(0)
    training.capture(1)
    training.store(1)
    assert training.steps_in_memory() == [0, 1]
    assert training.client.newest_complete(0) == 1

    training.client.leave(Farewell.OVER, TIMEOUT_S)
    assert until(lambda: is_gone(training))


def test_the_next_keeper_has_the_memory_of_one_that_was_killed(training):
    training.begin()
    training.capture(0)
    training.capture(1)
    slots = set(training.client.slots())
    for step in (2, 3):
        pid = training.client.keeper_pid
        os.kill(pid, signal.SIGKILL)
        training.wait(lambda _, pid=pid: training.client.keeper_pid not in (None, pid))
        training.wait(lambda _: set(training.client.slots()) == slots)
        training.capture(step)
    assert set(training.client.mapped()) == slots
    assert training.steps_in_memory() == [1, 2, 3]
    training.store(3)


def test_a_restart_finds_the_memory_of_the_trainer_before_it(make_training):
    first = make_training().begin()
    first.capture(4)
    first.capture(5)
    pid = first.client.keeper_pid
    first.client.leave(Farewell.LEFT, 0.0)

    second = make_training()
    second.client.connect(TIMEOUT_S)
    assert second.client.keeper_pid == pid
    assert second.steps_in_memory() == [4, 5]
    assert second.client.memory(TIMEOUT_S).end.step == 5
    second.begin(START + 1, 5)
    assert second.client.next_sequence() == 3
    second.capture(6)
    second.store(6)


def test_another_process_is_refused_and_may_look(training):
    training.begin()
    training.capture(7)
    program = (
        "import sys; from lazysnap.config import SnapshotConfig; from lazysnap.errors import JobBusy\n"
        "from lazysnap.keeper.client import KeeperClient; from lazysnap.keeper.identity import JobIdentity\n"
        "identity = JobIdentity.from_config(SnapshotConfig(job_id=sys.argv[1]))\n"
        "client = KeeperClient(identity, 0, linger_s=1.0, io_timeout_s=30.0)\n"
        "try: client.connect(30.0)\n"
        "except JobBusy as error: print(error)\n"
        "print(client.refusal() is not None, client.was_connected)"
    )
    command = [sys.executable, "-c", program, training.identity.job_id]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f"runs already on {training.identity.node}: process {os.getpid()}" in output.stdout
    assert f"`kill {os.getpid()}` ends it; or give this one a directory of its own" in output.stdout
    assert output.stdout.splitlines()[-1] == "True False"
    assert "waiting 3 s for another training" in output.stderr

    memory = NeighbourMemory(training.identity, 0, TIMEOUT_S)
    assert [entry.step for entry in memory.inventory.entries] == [7]
    memory.close()
    channel = try_connect(training.identity)
    assert ask(channel, Question(about="status"), TIMEOUT_S).status.run_id == RUN
    answer = ask(channel, Question(about="stop"), TIMEOUT_S)
    channel.close()
    assert f"process {os.getpid()}" in answer.text


def test_a_stopped_keeper_is_silent_and_training_goes_on(make_training, monkeypatch):
    monkeypatch.setattr(trainer_link, "_LEAST_S", 0.0)
    training = make_training(io_timeout_s=1.0).begin()
    stop(training.client.keeper_pid)
    training.wait(lambda _: training.client.is_silent)
    training.capture(0)
    with pytest.raises(KeeperError, match="did not report its memory within"):
        training.client.memory(0.1)
    os.kill(training.client.keeper_pid, signal.SIGCONT)
    training.wait(lambda _: not training.client.is_silent)
    assert training.steps_in_memory() == [0]


def test_a_stopped_keeper_is_named_to_who_wants_to_connect(make_training):
    first = make_training().begin()
    first.capture(0)
    pid = first.client.keeper_pid
    stop(pid)
    second = make_training(io_timeout_s=0.5)
    with pytest.raises(KeeperError, match=rf"did not answer within 0\.5 s \(io_timeout_s\).*`kill -CONT {pid}`"):
        second.client.connect(TIMEOUT_S)


def test_a_restart_waits_until_the_keeper_serves_at_the_address_of_the_new_start(make_training):
    """A keeper that outlived the start before says at first that it serves others: at the old address."""

    def discover(training):
        return discover_keepers(World(), training.client, SnapshotConfig(), "a job", alone=True)

    first = make_training().begin()
    first.capture(0)
    [old] = discover(first).reads.values()
    first.client.leave(Farewell.LEFT, 0.0)
    second = make_training()
    second.client.connect(TIMEOUT_S)
    assert second.client.state.serves_at == PeerAddress(*old)

    stop(second.client.keeper_pid)
    found = []
    discovering = threading.Thread(target=lambda: found.append(discover(second)))
    discovering.start()
    discovering.join(0.3)
    assert discovering.is_alive()
    os.kill(second.client.keeper_pid, signal.SIGCONT)
    discovering.join(TIMEOUT_S)

    [[new]] = [discovery.reads.values() for discovery in found]
    assert new != old
    socket.create_connection(new, TIMEOUT_S).close()


def test_returned_slots_are_freed_and_larger_ones_come(training):
    training.begin()
    old = {slot.slot_id for slot in training.client.slots()}
    larger = MemoryWish(num_slots=2, meta_bytes=4096, image_bytes=1 << 17)
    training.client.ask_memory(larger)
    for slot in training.client.slots():
        training.client.return_slot(slot)
    del slot
    training.wait(lambda state: len(state.slots) == 2 and not old & set(state.slots))
    training.wait(lambda _: len(training.client.slots()) == 2)
    assert {slot.image_capacity_bytes for slot in training.client.slots()} == {1 << 17}
    training.capture(0)


def test_a_name_is_given_and_taken_away(training):
    training.begin()
    training.capture(0)
    training.client.keep("best", 0)
    named = NamedStep("best", StepKey(START, 0))
    training.wait(lambda state: named in state.names)
    training.client.release("best")
    training.wait(lambda state: not state.names)


def test_memory_that_cannot_be_had_is_refused_with_a_reason(training):
    training.client.connect(TIMEOUT_S)
    training.client.ask_memory(MemoryWish(num_slots=1, meta_bytes=4096, image_bytes=1 << 45))
    training.wait(lambda state: state.memory_refusal)
    assert training.client.slots() == ()


def test_a_forked_child_that_outlives_the_trainer_does_not_keep_the_keeper(training):
    training.begin()
    training.capture(0)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        training.store(0)
        training.client.leave(Farewell.OVER, TIMEOUT_S)
        assert until(lambda: is_gone(training))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
