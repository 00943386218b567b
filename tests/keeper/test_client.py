"""A trainer's end of the connection to its keeper; the other end is played by the test."""

import contextlib
import os
import re
import socket
import struct
import subprocess
import tempfile
import threading
import time

import pytest
from fake_keeper import PID, TIMEOUT_S, FakeKeeper, Peer, handed_over_slot
from support.waiting import until

from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import (
    PROTOCOL,
    Farewell,
    JobSettings,
    KeeperState,
    LevelSettings,
    LevelState,
    MemoryWish,
    NamedStep,
    StepKey,
    TrainerState,
)
from lazysnap.errors import JobBusy, KeeperError
from lazysnap.keeper import mapped_slots, search, trainer_link, trainer_requests
from lazysnap.keeper.asking import NeighbourMemory, ask
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import Answer, KeptMemory, Question, SlotFacts
from lazysnap.keeper.trainer_link import Silence
from lazysnap.memory.slots import make_slot
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta

START = 0xABCDEF
JOB = JobSettings(run="ab" * 8, levels=(LevelSettings("/a"), LevelSettings("/b")))
WISH = MemoryWish(num_slots=2, meta_bytes=4096, image_bytes=4096)


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch):
    """A runtime directory of this test."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", directory)
        yield directory


@pytest.fixture
def identity(tmp_path):
    return JobIdentity.from_config(SnapshotConfig(job_id=str(tmp_path)))


@pytest.fixture
def keeper(identity):
    keeper = FakeKeeper(identity)
    yield keeper
    keeper.close()


@pytest.fixture
def make_client(identity):
    clients = []

    def make(io_timeout_s=TIMEOUT_S):
        clients.append(KeeperClient(identity, 0, linger_s=60.0, io_timeout_s=io_timeout_s))
        return clients[-1]

    yield make
    for client in clients:
        client.leave(Farewell.LEFT, 0.0)


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def peer(keeper, client):
    """The keeper's end of a connection to ``client``."""
    client.start()
    peer = keeper.accept()
    peer.state()
    peer.send()
    assert until(lambda: client.is_connected)
    return peer


@pytest.fixture
def slot():
    slot = handed_over_slot()
    yield slot
    slot.close()


def is_ready(client, count=1):
    return until(lambda: len(client.slots()) == count)


def capture(slot, step, sequence, start=START):
    meta = CaptureMeta("ab" * 8, f"{start:016x}", step, 0, 1, 0).to_bytes()
    slot.begin(start, step, sequence=sequence, image_bytes=100, meta=meta)
    slot.image[:100] = bytes([step]) * 100
    slot.commit(copied_ns=1)


def own_copies(descriptor):
    """Descriptors of this process of the same memory."""
    inode = os.fstat(descriptor).st_ino
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed just now
            count += os.fstat(int(name)).st_ino == inode
    return count


# The connection


def test_a_client_connects_and_says_who_it_is(keeper, client):
    client.start()
    peer = keeper.accept()

    state = peer.state()
    assert (state.local_rank, state.linger_s, state.start, state.job) == (0, 60.0, 0, None)
    assert not client.is_connected
    assert client.keeper_pid is None
    peer.send(newest_sequence=7)

    client.connect(TIMEOUT_S)
    assert client.is_connected
    assert client.was_connected
    assert client.keeper_pid == PID
    assert client.state == KeeperState(pid=PID, newest_sequence=7)
    assert client.next_sequence() == 8
    assert client.error is None


def test_a_keeper_that_is_started_gets_state_and_slots_before_it_runs(
    identity, keeper, client, peer, slot, monkeypatch
):
    """So no memory is lost if the trainer dies at that moment."""
    client.begin_start(JOB, START, -1)
    peer.state(lambda state: state.start == START)
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    assert until(client.mapped)
    inherited = []

    class NotStarted:
        """A process that does nothing yet."""

        returncode = None

        def __init__(self, command, pass_fds, **_):
            trainer = next(word for word in command if word.startswith("--trainer="))
            inherited.extend(os.dup(descriptor) for descriptor in pass_fds[:2])
            inherited.append(os.dup(int(trainer.partition("=")[2])))

        def wait(self):
            return 0

    monkeypatch.setattr(subprocess, "Popen", NotStarted)
    keeper.close()

    assert until(lambda: len(inherited) == 3)
    successor = Peer(socket.socket(fileno=inherited[2]))
    state = successor.state()
    assert (state.start, state.job, state.slots) == (START, JOB, (slot.slot_id,))
    assert list(successor.slots) == [slot.slot_id]
    successor.send(slots=(slot.slot_id,))
    assert until(lambda: client.is_connected)
    assert len(client.mapped()) == 1
    for descriptor in inherited[:2]:
        os.close(descriptor)
    client.leave(Farewell.LEFT, 0.0)
    assert successor.is_ended()
    successor.close()


def test_a_trainer_is_refused_while_another_one_is_attached(keeper, make_client, monkeypatch, caplog):
    caplog.set_level("INFO", "lazysnap")
    monkeypatch.setattr(search, "_REPORT_BUSY_S", 0.0)
    client = make_client()
    client.start()
    num_refused = 0
    while client.error is None:
        if keeper.is_called(0.05):
            peer = keeper.accept()
            peer.state()
            peer.send(refusal="process 5 is the trainer")
            assert peer.is_ended()
            num_refused += 1

    assert num_refused > 1
    refusal = client.refusal()
    assert isinstance(refusal, JobBusy)
    assert "runs already on" in str(refusal)
    assert "process 5 is the trainer; or give this one a directory of its own" in str(refusal)
    assert client.error is refusal
    assert "for another training of job" in caplog.text
    assert not client.wait(lambda state: False, TIMEOUT_S)  # at once: it gave up


def test_a_trainer_that_was_just_killed_is_waited_for(keeper, client):
    client.start()
    first = keeper.accept()
    first.state()
    first.send(refusal="process 5 is the trainer")
    first.is_ended()
    second = keeper.accept()
    second.state()
    second.send()

    client.connect(TIMEOUT_S)
    assert client.refusal() is None


def test_after_it_gave_up_a_client_can_be_started_again(keeper, make_client):
    client = make_client(io_timeout_s=0.2)
    client.start()
    assert until(lambda: client.error is not None)
    assert "did not answer within 0.2 s (io_timeout_s): it is stopped" in str(client.error)
    with pytest.raises(KeeperError, match="kill -CONT"):
        client.connect(1.0)
    while not client.is_connected:
        client.start()
        if keeper.is_called(0.05):
            with contextlib.suppress(OSError):  # the first ones hung up
                keeper.accept().send()


def test_a_keeper_of_another_version_is_named(identity, keeper, client):
    client.start()
    peer = keeper.accept()
    peer.state()
    os.write(peer.channel.fileno(), b"\x02\x00\x00\x00\xff\xff\x00\x00{}")

    assert until(lambda: client.error is not None)
    assert f"process {os.getpid()}, at the socket of this job's keeper, is of another version" in str(client.error)


def test_what_is_no_keeper_is_named(keeper, client):
    client.start()
    peer = keeper.accept()
    peer.state()
    os.write(peer.channel.fileno(), struct.pack("<IHH", 2, PROTOCOL, 0) + b"[]")

    assert until(lambda: client.error is not None)
    assert re.search("is no keeper: .*; end it, or give the job another name", str(client.error))


def test_a_keeper_without_its_page_is_no_keeper(keeper, client):
    client.start()
    peer = keeper.accept()
    peer.state()
    peer.is_greeted = True
    peer.send()

    assert until(lambda: client.error is not None)
    assert "sent no page" in str(client.error)
    assert not client.was_connected


def test_a_lost_connection_begins_again_with_state_and_slots(keeper, client, peer, slot):
    client.ask_memory(WISH)
    client.begin_start(JOB, START, 3, "memory")
    client.require(5)
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    is_ready(client)
    is_lost = threading.Event()
    waiting = threading.Thread(target=lambda: client.wait(lambda _: not client.is_connected, 60) and is_lost.set())
    waiting.start()
    peer.channel.close()

    again = keeper.accept()
    assert is_lost.wait(TIMEOUT_S)
    assert client.slots() == ()
    assert len(client.mapped()) == 1
    state = again.state()
    assert (state.start, state.step, state.source, state.required, state.memory) == (START, 3, "memory", (5,), WISH)
    assert list(again.slots) == [slot.slot_id]
    again.send()
    assert until(lambda: client.is_connected)
    assert client.slots() == ()  # the keeper does not have it yet
    again.send([slot.descriptor], slots=(slot.slot_id,))
    is_ready(client)
    assert len(client.mapped()) == 1


# Silence


def test_a_keeper_that_sends_nothing_is_asked_and_found_silent(keeper, make_client, monkeypatch):
    monkeypatch.setattr(trainer_link, "_LEAST_S", 0.0)
    client = make_client(io_timeout_s=0.6)
    client.start()
    peer = keeper.accept()
    peer.state()
    peer.send()

    question = peer.question()
    assert (question.about, question.number) == ("memory", 0)
    assert client.wait(lambda _: client.is_silent, TIMEOUT_S)
    assert client.is_connected

    peer.answer(0, None)
    assert client.wait(lambda _: not client.is_silent, TIMEOUT_S)


def test_time_in_which_this_process_itself_was_stopped_does_not_count():
    watch = Silence(10.0)
    assert watch.wait_s() == 5.0
    watch.waited(3600.0, is_answered=False)
    assert watch.is_question_due
    watch.expect_answer()
    assert not watch.is_question_due
    watch.waited(3600.0, is_answered=False)
    assert not watch.is_silent
    for _ in range(40):
        watch.waited(watch.wait_s(), is_answered=False)
    assert watch.is_silent
    watch.waited(0.1, is_answered=True)
    assert not watch.is_silent
    assert watch.wait_s() == 5.0


# Slots


def test_slots_are_mapped_once_and_shown_when_they_are_ready(client, peer, slot):
    readied = []
    client.make_ready(readied.append)
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    assert until(client.mapped)
    assert client.slots() == ()  # nobody wants memory yet
    assert readied == []

    client.ask_memory(WISH)
    is_ready(client)
    assert readied == list(client.slots())
    peer.state(lambda state: state.memory == WISH and state.slots == (slot.slot_id,))
    before = own_copies(slot.descriptor)
    peer.send([slot.descriptor], slots=(slot.slot_id,), memory_refusal="no more")
    assert until(lambda: client.state.memory_refusal == "no more")
    assert len(client.mapped()) == 1
    assert own_copies(slot.descriptor) == before


def too_large():
    """A file that says that it is a slot, and that cannot be mapped."""
    descriptor = os.memfd_create("large")
    size_bytes = 1 << 60
    os.ftruncate(descriptor, size_bytes)
    os.pwrite(descriptor, struct.pack("<4Q", 0x32544F4C53505A4C, 1, 4096, size_bytes - 8192), 0)
    return descriptor


def test_descriptors_that_cannot_be_used_are_closed(client, peer, slot):
    """Neither one for which there is no room, nor what follows a message that cannot be used, is left open."""
    large = too_large()
    before = own_copies(slot.descriptor)
    peer.send([large], slots=(1,), newest_sequence=1)
    assert until(lambda: client.state.newest_sequence == 1)
    body = b'{"type":"keeper","slots":7}'
    head = struct.pack("<IHH", len(body), PROTOCOL, 1)
    with socket.socket(fileno=os.dup(peer.channel.fileno())) as sock:
        socket.send_fds(sock, [head + body], [slot.descriptor])

    assert until(lambda: not client.is_connected)
    assert until(lambda: own_copies(slot.descriptor) == before)
    assert own_copies(large) == 1
    os.close(large)


def test_a_slot_that_cannot_be_mapped_is_memory_that_was_refused(client, peer, slot):
    """Nothing else would say why no capture begins."""
    client.ask_memory(WISH)
    empty = os.open(os.devnull, os.O_RDWR)
    peer.send([empty, slot.descriptor], slots=(1, slot.slot_id))
    os.close(empty)

    is_ready(client)
    assert client.memory_refusal.startswith("a slot of the keeper cannot be mapped: ")
    assert client.is_connected


def test_a_slot_that_cannot_be_populated_is_reported_and_tried_again(client, peer, tmp_path, monkeypatch):
    """Else captures find no slot for ever, and nothing says why."""
    monkeypatch.setattr(mapped_slots, "_AGAIN_S", 0.01)
    with contextlib.closing(make_slot(4096, 1 << 16, str(tmp_path))) as slot:
        peer.send([slot.descriptor], slots=(slot.slot_id,))
        assert until(client.mapped)
        os.ftruncate(slot.descriptor, slot.size_bytes - 4096)  # its last page cannot be entered

        client.ask_memory(WISH)
        assert until(lambda: client.memory_refusal)
        assert client.slots() == ()

        os.ftruncate(slot.descriptor, slot.size_bytes)
        is_ready(client)
        assert client.memory_refusal == ""


def test_without_a_thread_there_is_no_memory_and_no_error(client, peer, slot):
    """Training goes on: neither the connection nor the pages of slots are worth its end."""
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    assert until(client.mapped)
    other = KeeperClient(client._identity, local_rank=1, linger_s=60.0, io_timeout_s=TIMEOUT_S)
    stack_bytes = threading.stack_size(1 << 47)  # more than there are addresses
    try:
        client.ask_memory(WISH)
        other.start()
    finally:
        threading.stack_size(stack_bytes)

    assert "thread" in client.memory_refusal
    assert "thread" in str(other.error)
    other.leave(Farewell.LEFT, timeout_s=0.0)

    client.ask_memory(WISH)
    is_ready(client)
    assert client.memory_refusal == ""


def test_a_returned_slot_is_unmapped_and_said_until_the_keeper_freed_it(client, peer, slot):
    client.ask_memory(WISH)
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    is_ready(client)
    before = own_copies(slot.descriptor)
    client.return_slot(client.slots()[0])
    client.return_slot(type(slot).attach(os.dup(slot.descriptor)))  # not one of its own: nothing happens

    assert client.mapped() == client.slots() == ()
    assert until(lambda: own_copies(slot.descriptor) < before)
    state = peer.state(lambda state: state.returned)
    assert (state.slots, state.returned) == ((), (slot.slot_id,))
    peer.send([slot.descriptor], slots=(slot.slot_id,), newest_sequence=1)  # said before it was freed
    assert until(lambda: client.state.newest_sequence == 1)
    assert client.mapped() == ()
    peer.send()
    peer.state(lambda state: not state.returned)


def test_sequence_numbers_grow_beyond_all_that_memory_holds(client, peer, slot):
    client.ask_memory(WISH)
    assert client.next_sequence() == 1
    peer.send(newest_sequence=4)
    assert until(lambda: client.state.newest_sequence)
    assert client.next_sequence() == 5
    other = handed_over_slot()
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    is_ready(client)
    capture(client.slots()[0], 3, 90)
    client.return_slot(client.slots()[0])
    peer.send([other.descriptor])
    assert until(client.mapped)
    assert client.next_sequence() == 6
    other.close()


def test_the_keeper_is_woken_for_the_steps_that_it_awaits(client, peer):
    peer.page.set_awaited_step(7)
    client.wake(6)
    assert not peer.is_awake()
    client.wake(7)
    assert peer.is_awake()
    peer.page.set_awaited_step(None)
    client.wake(8)
    assert not peer.is_awake()


def test_without_a_keeper_nobody_is_woken(client):
    client.wake(1)
    assert client.slots() == ()


# What is answered is not asked again


def level(*steps, given_up=()):
    complete = tuple(StepKey(START, step) for step in steps)
    return LevelState(complete=complete, given_up=tuple(StepKey(START, step) for step in given_up))


@pytest.fixture
def begun(client, peer):
    """The keeper's end, once the trainer began a start."""
    client.begin_start(JOB, START, -1)
    peer.state(lambda state: state.start == START)
    return peer


def test_a_required_step_is_dropped_when_every_level_answered(client, begun):
    for step in (1, 2, 3):
        client.require(step)
    client.require(1)
    assert begun.state(lambda state: len(state.required) == 3).required == (1, 2, 3)
    begun.send(levels=(level(1),), newest_sequence=1)  # of fewer levels than the job has
    assert until(lambda: client.state.newest_sequence == 1)
    assert client.is_complete(1, 0)
    assert not client.is_complete(1, 1)
    begun.send(levels=(level(1, 2), level(1)))
    assert begun.state(lambda state: len(state.required) == 2).required == (2, 3)
    begun.send(levels=(level(1, 2), level(1, given_up=(2,))))
    assert begun.state(lambda state: len(state.required) == 1).required == (3,)
    begun.send(levels=(level(), level()), lost=(StepKey(START, 3),))
    begun.state(lambda state: not state.required)


def test_a_protected_step_is_dropped_when_it_is_protected(client, begun):
    client.protect(4)
    client.protect(6)
    begun.state(lambda state: state.protect == (4, 6))
    begun.send(protected=StepKey(START, 5))
    begun.state(lambda state: state.protect == (6,))


def test_names_are_given_moved_and_taken_away(client, begun):
    client.keep("best", 1)
    client.keep("best", 2)
    client.keep("bad", 2)
    best = NamedStep("best", StepKey(START, 2))
    bad = NamedStep("bad", StepKey(START, 2))
    begun.state(lambda state: state.names == (best, bad))
    begun.send(names=(best,))
    begun.state(lambda state: state.names == (bad,))
    client.release("bad")
    begun.state(lambda state: not state.names)

    client.release("best")
    begun.state(lambda state: NamedStep("best", StepKey(START + 1, 0)) in state.released)
    begun.send()
    client.keep("best", 3)
    client.keep("best", 4)
    state = begun.state(lambda state: state.names == (NamedStep("best", StepKey(START, 4)),))
    assert NamedStep("best", StepKey(START, 3)) in state.released


def test_a_name_whose_step_is_lost_is_taken_once_and_one_that_is_given_or_released_never(client, begun):
    given = NamedStep("given", StepKey(START, 3))
    late = NamedStep("late", StepKey(START, 4))
    for named in (given, late, NamedStep("released", late.key)):
        client.keep(named.name, named.key.step)
    client.release("released")
    begun.state(lambda state: state.names == (given, late) and state.released)

    begun.send(names=(given,), lost=(given.key, late.key))
    assert until(lambda: client.state.lost)
    begun.state(lambda state: state.names == (late,))

    assert client.take_lost_names() == (late,)
    assert client.take_lost_names() == ()
    begun.state(lambda state: not state.names)


def test_names_are_answered_once_the_first_level_has_them_or_never_will():
    key = StepKey(START, 3)
    nothing = TrainerState(0, start=START, job=JOB)
    asked = trainer_requests.with_name(trainer_requests.without_name(nothing, "old"), "good", 3)
    good = NamedStep("good", key)

    def is_answered(**fields):
        return trainer_requests.are_names_answered(asked, KeeperState(**fields))

    assert trainer_requests.are_names_answered(nothing, KeeperState())
    assert not is_answered()
    assert not is_answered(names=(good, NamedStep("old", StepKey(1, 1))))
    assert is_answered(names=(good,))
    assert is_answered(lost=(key,))
    assert is_answered(levels=(LevelState(is_failing=True),))


def test_names_that_were_taken_away_are_few(client, begun):
    """Slower levels may still have them, and each later keeper gets to know."""
    for number in range(20):
        client.release(f"name {number}")
    begun.state(lambda state: len(state.released) == 20)
    begun.send(names=(NamedStep("name 1", StepKey(START, 1)),))
    state = begun.state(lambda state: len(state.released) < 20)
    assert [removal.name for removal in state.released] == [f"name {number}" for number in (1, *range(4, 20))]


def test_a_start_forgets_what_was_asked_of_the_one_before(client, begun):
    client.require(1)
    client.keep("a", 1)
    client.release("b")
    client.preempt()
    client.seal()
    begun.state(lambda state: state.is_sealed)
    begun.send(levels=(level(1), level()))
    assert until(lambda: client.newest_complete(0) == 1)

    client.begin_start(JOB, START + 1, 7)
    state = begun.state(lambda state: state.start == START + 1)
    assert (state.required, state.names, state.released, state.step) == ((), (), (), 7)
    assert state.is_preempted
    assert client.newest_complete(0) == -1
    assert client.newest_complete(5) == -1


def test_what_was_not_sent_yet_cannot_have_been_answered(client, begun):
    client.require(1)
    begun.state(lambda state: state.required == (1,))
    begun.send(levels=(level(1), level(1)))
    begun.state(lambda state: not state.required)
    client.require(1)
    begun.state(lambda state: state.required == (1,))


# Questions


def test_memory_is_told_with_slots_that_are_mapped(client, peer, slot):
    client.ask_memory(WISH)
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    is_ready(client)
    capture(client.slots()[0], 3, 5)
    found = []
    asking = threading.Thread(target=lambda: found.append(client.memory(TIMEOUT_S)))
    asking.start()
    question = peer.question()
    checksums = Checksums(100, 100, ("0" * 16,))
    facts = (SlotFacts(slot.slot_id, 5, checksums), SlotFacts(99, 6, None))
    peer.answer(question.number + 1, KeptMemory())
    peer.answer(question.number, KeptMemory(facts, None, (0, 1)))
    asking.join(TIMEOUT_S)

    [inventory] = found
    [entry] = inventory.entries
    assert (entry.step, entry.run_id, entry.start) == (3, "ab" * 8, f"{START:016x}")
    assert (entry.sequence, entry.rank, entry.world_size, entry.checksums) == (5, 0, 1, checksums)
    assert entry.slot is client.slots()[0]
    assert inventory.local_ranks == (0, 1)


def test_a_question_is_asked_again_where_the_keeper_is_lost(keeper, client, peer):
    found = []
    asking = threading.Thread(target=lambda: found.append(client.memory(TIMEOUT_S)))
    asking.start()
    number = peer.question().number
    peer.channel.close()
    again = keeper.accept()
    again.state()
    again.send()
    assert again.question().number == number
    again.answer(number, KeptMemory())
    asking.join(TIMEOUT_S)
    assert found[0].entries == ()


def test_a_question_without_an_answer_ends(client, peer):
    with pytest.raises(KeeperError, match=r"did not report its memory within 0\.05 s"):
        client.memory(0.05)


def test_anybody_may_ask(identity, keeper):
    answers = []

    def answer():
        peer = keeper.accept()
        assert peer.question().about == "status"
        peer.channel.send(Answer(text="none"))

    asked = threading.Thread(target=answer)
    asked.start()
    channel = try_connect(identity)
    answers.append(ask(channel, Question(about="status"), TIMEOUT_S))
    channel.close()
    asked.join(TIMEOUT_S)
    assert answers == [Answer(text="none")]


def test_a_neighbour_reads_and_cannot_write(identity, keeper, client, peer, slot):
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    assert until(client.mapped)
    capture(client.mapped()[0], 3, 5)

    def answer():
        other = keeper.accept()
        assert other.question().local_rank == 1
        reading = slot.reading_descriptor()
        empty = os.open(os.devnull, os.O_RDONLY)
        facts = (SlotFacts(slot.slot_id, 5, None), SlotFacts(7, 5, None))
        other.channel.send(Answer(memory=KeptMemory(facts)), [reading, empty])
        os.close(reading)
        os.close(empty)

    asked = threading.Thread(target=answer)
    asked.start()
    memory = NeighbourMemory(identity, 1, TIMEOUT_S)
    asked.join(TIMEOUT_S)

    [entry] = memory.inventory.entries
    assert (entry.step, bytes(entry.slot.read(0, 100))) == (3, b"\x03" * 100)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(entry.slot.descriptor, b"x", 0)
    memory.close()


def test_without_a_keeper_there_is_no_neighbour(identity):
    with pytest.raises(KeeperError, match="no keeper of job"):
        NeighbourMemory(identity, 0, 1.0)


def test_a_neighbour_is_not_waited_for_without_end(identity, keeper):
    with pytest.raises(KeeperError, match="no answer in time"):
        NeighbourMemory(identity, 0, 0.05)


# The end


@pytest.mark.parametrize("farewell", [Farewell.OVER, Farewell.LEFT])
def test_the_keeper_is_told_how_a_training_ends_and_nothing_stays_mapped(client, begun, slot, farewell):
    before = own_copies(slot.descriptor)
    client.ask_memory(WISH)
    begun.send([slot.descriptor], slots=(slot.slot_id,))
    is_ready(client)
    client.require(9)
    leaving = threading.Thread(target=client.leave, args=(farewell, TIMEOUT_S))
    leaving.start()
    state = begun.state(lambda state: state.farewell is not Farewell.NONE)
    begun.end()
    leaving.join(TIMEOUT_S)

    assert own_copies(slot.descriptor) == before
    assert (state.farewell, state.required) == (farewell, (9,))
    assert begun.is_ended()
    assert client.mapped() == client.slots() == ()
    with pytest.raises(KeeperError, match="this connection was closed"):
        client.connect(1.0)


def test_a_training_that_is_over_waits_for_the_keeper_that_is_told(keeper, client, peer):
    peer.channel.close()
    assert until(lambda: not client.is_connected)
    leaving = threading.Thread(target=client.leave, args=(Farewell.OVER, TIMEOUT_S))
    leaving.start()
    again = keeper.accept()
    again.state()
    again.send()
    assert again.state(lambda state: state.farewell is Farewell.OVER)
    again.end()
    leaving.join(TIMEOUT_S)
    assert not leaving.is_alive()


def test_a_training_that_is_over_waits_for_the_end_of_its_keeper(client, begun):
    """The keeper writes its last event until then; the program may delete the directory behind it."""
    leaving = threading.Thread(target=client.leave, args=(Farewell.OVER, TIMEOUT_S))
    leaving.start()
    begun.state(lambda state: state.farewell is Farewell.OVER)
    assert begun.read(timeout_s=0.1), "the trainer hung up"
    begun.end()
    leaving.join(TIMEOUT_S)
    assert not leaving.is_alive()


def test_a_training_that_is_over_wants_no_other_keeper_after_the_one_that_it_told_at_once(keeper, client, peer):
    peer.channel.close()
    searched = keeper.accept()
    searched.state()
    leaving = threading.Thread(target=client.leave, args=(Farewell.OVER, 3 * TIMEOUT_S))
    leaving.start()
    assert until(lambda: client._link.is_leaving)
    searched.channel.close()
    told = keeper.accept()
    assert told.state().farewell is Farewell.OVER

    told.channel.close()  # it has nothing to do, and ends

    leaving.join(TIMEOUT_S)
    assert not leaving.is_alive()


def test_a_client_that_was_never_started_leaves_at_once(client):
    client.leave(Farewell.OVER, TIMEOUT_S)
    client.start()
    assert not client.is_connected


def test_leaving_does_not_wait_for_a_keeper_that_does_not_answer(keeper, client):
    client.start()
    keeper.accept().state()
    began_at_s = time.monotonic()
    client.leave(Farewell.LEFT, 0.0)
    assert time.monotonic() - began_at_s < 5.0


def test_a_forked_child_has_neither_keeper_nor_slots(client, peer, slot):
    client.ask_memory(WISH)
    peer.send([slot.descriptor], slots=(slot.slot_id,))
    is_ready(client)
    child = os.fork()
    if child == 0:
        client.wake(1)
        is_clean = not client.is_connected and client.slots() == client.mapped() == ()
        client.require(1)
        client.start()
        client.leave(Farewell.OVER, 5.0)
        os._exit(0 if is_clean else 1)
    assert os.waitpid(child, 0)[1] == 0

    client.require(2)
    peer.send(slots=(slot.slot_id,), newest_sequence=3)
    assert until(lambda: client.state.newest_sequence == 3)
    assert peer.state(lambda state: state.required).required == (2,)
    assert len(client.slots()) == 1
