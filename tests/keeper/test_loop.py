"""A keeper process and what it sends, between death and restart of its trainers: memory alone, no levels."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from msgspec import structs
from support.hand_trainer import IMAGE_BYTES, JOB, WISH, HandTrainer, identity_of
from support.waiting import TIMEOUT_S, until

from lazysnap.core.messages import Farewell, LevelSettings, StepKey
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.questions import Question
from lazysnap.memory.slots import Slot
from lazysnap.shard.checksum import Checksums

JOB_ID = "loop"


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", directory)
        yield directory


@pytest.fixture
def connect():
    """Makes trainers of the job; its keepers are ended with the test."""
    trainers = []
    pids = set()

    def make(*, is_refused=False, **fields):
        trainer = HandTrainer(JOB_ID, **fields)
        trainers.append(trainer)
        if not is_refused:
            pids.add(trainer.until_state(lambda state: state.pid > 0).pid)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make_ready(connect):
    """Makes trainers with two slots that began a start."""

    def make(start=5, job=JOB, **fields):
        trainer = connect(memory=WISH, **fields)
        trainer.until_state(lambda state: len(state.slots) == WISH.num_slots)
        trainer.change(start=start, step=0, job=job)
        return trainer

    return make


@contextlib.contextmanager
def killed_trainer(*steps):
    """A trainer in another process that captured these steps and was killed."""
    command = [sys.executable, "-m", "support.hand_trainer", JOB_ID, *map(str, steps)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout.readline() == "captured\n"
        process.kill()
        process.wait(TIMEOUT_S)
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdout.close()


def is_alive(pid):
    """True unless the process ended, also if nobody waited for it yet."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def is_gone():
    channel = try_connect(identity_of(JOB_ID))
    if channel is not None:
        channel.close()
    return channel is None and not identity_of(JOB_ID).files.lock_path.exists()


def ask_as_stranger(**question):
    """Ask as a process that trains nothing. Returns: the frame with the answer."""
    with contextlib.closing(try_connect(identity_of(JOB_ID))) as channel:
        channel.send(Question(**question))
        return next_frame(channel)


def next_frame(channel):
    """The next message of the keeper, and its descriptors."""
    frames = []
    while not frames:
        channel.wait(10.0)
        frames = channel.receive()
        assert frames is not None, "the keeper ended without an answer"
    return frames[0]


def have_checksums():
    """True if the keeper has checksums of all captures, and they agree with the slots that it lends."""
    frame = ask_as_stranger(about="memory")
    memory = frame.message.memory
    with contextlib.ExitStack() as stack:
        for facts in memory.slots:
            slot = Slot.attach(frame.descriptors.pop(0))
            stack.callback(slot.close)
            assert slot.slot_id == facts.slot_id
            assert fcntl.fcntl(slot.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if facts.checksums is None:
                return False
            assert facts.checksums == Checksums.of(slot.read(0, facts.checksums.size_bytes))
    return len(memory.slots) == WISH.num_slots


def test_a_trainer_gets_the_memory_that_it_wishes_for(connect):
    trainer = connect(memory=WISH)

    state = trainer.until_state(lambda state: len(state.slots) == WISH.num_slots)

    trainer.until_state(lambda _: set(trainer.slots) == set(state.slots))
    assert all(slot.image_capacity_bytes == IMAGE_BYTES for slot in trainer.slots.values())
    assert not state.memory_refusal


def test_too_little_memory_is_refused_with_the_reason(connect):
    trainer = connect(memory=structs.replace(WISH, max_bytes=1000))

    state = trainer.until_state(lambda state: state.memory_refusal)

    assert "MemoryLevel.max_bytes leaves 1000" in state.memory_refusal


def test_what_training_still_takes_is_left_free_before_the_first_slot_is_made():
    script = (
        "from support.hand_trainer import WISH, identity_of\n"
        "from msgspec.structs import replace\n"
        "from lazysnap.core.actions import TrainerReported\n"
        "from lazysnap.core.messages import TrainerState\n"
        "from lazysnap.keeper.loop import Keeper\n"
        "from lazysnap.memory.budget import NODE\n"
        "from lazysnap.keeper.trouble import Trouble\n"
        f"files = identity_of({JOB_ID!r}).files\n"
        "keeper = Keeper(files.try_lock(), Trouble(files.log_path))\n"
        "state = TrainerState(local_rank=0, memory=replace(WISH, growth_bytes=1 << 60))\n"
        "before = NODE.free_bytes()\n"
        "keeper._core.step(TrainerReported(1, 1, state), now=0.0)  # nothing is carried out yet\n"
        "print(before > 0, NODE.free_bytes())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    run = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True, timeout=60)

    assert run.stdout == "True 0\n", run.stderr


def test_a_trainer_that_dies_leaves_its_captures_to_the_next_one(connect):
    with killed_trainer(1, 2, 3) as process:
        trainer = connect()
        trainer.until_state(lambda state: len(state.slots) == WISH.num_slots)

    steps = sorted(slot.view().step for slot in trainer.slots.values())
    answer, descriptors = trainer.ask(about="memory", number=7)

    assert steps == [2, 3]
    assert trainer.keeper.newest_sequence == 3
    assert answer.number == 7
    assert answer.memory.end.step == 3
    assert answer.memory.local_ranks == (0,)
    assert {facts.slot_id for facts in answer.memory.slots} == set(trainer.slots)
    assert descriptors == []
    assert process.pid != trainer.keeper.pid


def test_while_nobody_trains_captures_get_checksums_and_can_be_read_by_others():
    with killed_trainer(1, 2):
        pass

    until(have_checksums)

    assert not ask_as_stranger(about="stop", is_forced=True).message.text
    until(is_gone)


def test_a_second_process_is_refused_while_the_first_one_trains(make_ready):
    with killed_trainer(1):
        pass
    trainer = make_ready(start=6)
    script = (
        "from support.hand_trainer import HandTrainer\n"
        f"trainer = HandTrainer({JOB_ID!r})\n"
        "print(trainer.until_state(lambda state: state.refusal).refusal)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    output = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True, timeout=60)

    assert f"`kill {os.getpid()}` ends it" in output.stdout, output.stderr
    trainer.capture(7)


def test_the_keeper_ends_with_the_training_that_is_over(make_ready):
    trainer = make_ready()
    trainer.capture(1)

    trainer.change(farewell=Farewell.OVER)
    trainer.until_over()

    until(is_gone)
    assert not is_alive(trainer.keeper.pid)


def test_memory_outlives_a_keeper_that_is_killed(make_ready, connect):
    trainer = make_ready()
    slot = trainer.capture(1)
    os.kill(trainer.keeper.pid, signal.SIGKILL)
    trainer.until_over()
    until(lambda: not is_alive(trainer.keeper.pid))

    survivor = connect(memory=WISH, slots=(slot.slot_id,), handed_over=[slot.descriptor])
    survivor.until_state(lambda state: slot.slot_id in state.slots)

    assert survivor.keeper.pid != trainer.keeper.pid
    assert survivor.slots[slot.slot_id].view().step == 1


def test_an_incomplete_capture_of_a_dead_trainer_is_void(connect, make_ready):
    with killed_trainer(1) as process:
        assert process.returncode is not None
    trainer = make_ready()
    assert [slot.view().step for slot in trainer.slots.values() if slot.view().step] == [1]
    slot = trainer.capture(2, is_whole=False)
    trainer.change(farewell=Farewell.LEFT)
    trainer.until_over()

    until(lambda: slot.view().phase.value == "void")


@pytest.mark.parametrize("is_forced", [False, True])
def test_the_keeper_of_a_training_that_runs_stays(make_ready, is_forced):
    trainer = make_ready()

    frame = ask_as_stranger(about="stop", is_forced=is_forced)

    assert frame.message.text == f"its training runs, process {os.getpid()}; end that first"
    assert is_alive(trainer.keeper.pid)


def test_a_keeper_whose_trainer_died_ends_when_asked():
    with killed_trainer(1):
        pass

    frame = ask_as_stranger(about="stop")

    assert not frame.message.text
    until(is_gone)


def test_each_process_that_asks_a_keeper_to_end_gets_an_answer(make_ready, tmp_path):
    """Both ask while the newest capture is being stored, at a level that takes two seconds for it."""
    level = LevelSettings(str(tmp_path / "level"), every_n_steps=1, max_bytes_per_s=IMAGE_BYTES // 2)
    trainer = make_ready(job=structs.replace(JOB, levels=(level,)))
    trainer.capture(3)
    trainer.change(farewell=Farewell.LEFT)
    trainer.until_over()

    with contextlib.ExitStack() as stack:
        channels = []
        for number in (1, 2):
            channel = stack.enter_context(contextlib.closing(try_connect(identity_of(JOB_ID))))
            channel.send(Question(about="stop", number=number))
            channels.append(channel)
        answers = [next_frame(channel).message for channel in channels]

    assert [answer.number for answer in answers] == [1, 2]
    assert [answer.durable for answer in answers] == [{level.url: 3}] * 2
    until(is_gone)


def test_sigterm_ends_a_keeper_that_waits_for_a_restart(connect):
    with killed_trainer(1):
        pass
    trainer = connect()
    os.kill(trainer.keeper.pid, signal.SIGTERM)
    trainer.change(farewell=Farewell.LEFT)
    trainer.until_over()

    until(is_gone)


def test_the_state_of_the_node_is_told_to_anybody(make_ready):
    trainer = make_ready()
    trainer.capture(4)

    frame = ask_as_stranger(about="status", number=3)

    status = frame.message.status
    assert frame.message.number == 3
    assert status.common_step == 4
    assert [rank.pid for rank in status.ranks] == [os.getpid()]


def test_an_error_in_the_loop_ends_the_keeper_and_is_reported(monkeypatch, connect):
    monkeypatch.setenv("LAZYSNAP_FAULT", "keeper.memory.drop:1:raise")
    trainer = connect(memory=WISH)
    state = trainer.until_state(lambda state: len(state.slots) == WISH.num_slots)

    trainer.change(returned=(state.slots[0],), memory=None)
    trainer.until_state(lambda state: any(alert.about == "keeper" for alert in state.alerts))
    trainer.until_over()

    assert "injected at keeper.memory.drop" in trainer.keeper.alerts[-1].text
    until(lambda: not is_alive(state.pid))
    assert "injected" in identity_of(JOB_ID).files.log_path.read_text()


def test_an_error_of_the_loop_is_none_of_the_question_that_it_came_with(make_ready, monkeypatch, tmp_path):
    """The question was answered with it, and the keeper went on in a state that nobody knows."""
    monkeypatch.setenv("LAZYSNAP_FAULT", "keeper.slot_held:1:raise")
    job = structs.replace(JOB, levels=(LevelSettings(str(tmp_path / "level"), every_n_steps=1),))
    trainer = make_ready(job=job, required=(3,))
    trainer.until_state(lambda state: state.levels and state.levels[0].is_listed)
    trainer.page.wake = lambda step: None
    trainer.capture(3)

    trainer.channel.send(Question(about="status"))

    trainer.until_over()
    assert not trainer.answers
    assert "injected at keeper.slot_held" in trainer.keeper.alerts[-1].text


def test_a_process_that_asks_and_reads_nothing_holds_up_nobody(make_ready):
    trainer = make_ready()
    deaf = try_connect(identity_of(JOB_ID))
    with contextlib.suppress(OSError):
        for _ in range(10_000):
            if deaf.is_sending:
                break
            deaf.send(Question(about="memory"))

    answer, _ = trainer.ask(about="status")

    assert answer.status is not None
    deaf.close()


def test_what_was_captured_is_stored_at_a_level_and_reported_as_complete(make_ready, tmp_path):
    job = structs.replace(JOB, levels=(LevelSettings(str(tmp_path / "level"), every_n_steps=1),))
    trainer = make_ready(job=job)
    trainer.change(required=(3,))

    trainer.capture(3)

    state = trainer.until_state(lambda state: state.levels and state.levels[0].complete)
    assert state.levels[0].complete == (StepKey(5, 3),)
    answer, _ = trainer.ask(about="memory")
    assert [facts.sequence for facts in answer.memory.slots if facts.checksums] == [1]


def test_at_rest_the_keeper_does_not_wake_up(make_ready):
    trainer = make_ready()
    trainer.capture(1)
    trainer.ask(about="status")

    def is_at_rest():
        before = switches(trainer.keeper.pid)
        trainer.channel.wait(2.0)
        return switches(trainer.keeper.pid) - before <= 1

    until(is_at_rest)  # the first seconds may still belong to what was captured


def switches(pid):
    """How often the main thread of a process went to sleep."""
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))
