"""After preemption the newest captured step is durable and the process is gone, with every integration and phase."""

import os
import random
import signal

import pytest

PHASES = ["before", "step", "evaluation", "save_state"]
INTEGRATIONS = {"plain": PHASES, "lightning": PHASES, "accelerate": PHASES, "transformers": PHASES[:3]}
ENDED = 143


def moments():
    """Integration, phase, step and parent of seeded moments.

    Each phase of each integration meets the signal once, in turn in a step that stays, and in one beside which the
    training goes on; each phase has both among the integrations. Process 1 handles signals as any other process but for
    their default action, which is the same for all: it has one moment.
    """
    draw = random.Random(0)
    for number, (integration, phases) in enumerate(INTEGRATIONS.items()):
        for phase in phases:
            parent, goes_on = (("a shell", ""), ("an init", "+"))[(number + PHASES.index(phase)) % 2]
            yield integration, phase, f"{step_of(phase, draw)}{goes_on}", parent
    yield "plain", "step", "9", "process 1"


def step_of(phase, draw):
    """Draw a step that has this phase."""
    if phase == "before":
        return 0
    return 5 * draw.randint(1, 4) if phase == "evaluation" else draw.randint(2, 20)


def check(trainings, run, code):
    assert code == ENDED, "\n".join(run.lines)
    assert "over" not in run.lines
    cut, durable = run.cut()
    captured = max(run.steps("boundary"), default=0)
    if captured:
        assert durable is not None
        assert captured <= durable < cut <= captured + 2, "\n".join(run.lines)
    assert (trainings.durable() or None) == (durable or None)


@pytest.mark.parametrize(("integration", "phase", "at", "parent"), list(moments()))
def test_preemption_at_any_moment_leaves_the_newest_step_durable(integration, phase, at, parent, trainings, namespaces):
    run = trainings.start(integration, phase, at, parent=parent)
    run.await_line(f"{phase} {at.rstrip('+')}")
    os.kill(run.pid(), signal.SIGTERM)
    check(trainings, run, run.end())


def test_a_step_that_does_not_end_is_cut_and_the_one_before_it_is_durable(trainings):
    run = trainings.start("plain", "step", "7")
    run.await_line("step 7")
    os.kill(run.pid(), signal.SIGTERM)
    check(trainings, run, run.end())
    assert run.cut() == (7, 6)

    again = trainings.start("plain", "step", "8")
    again.await_line("step 8")
    assert "step 7" in again.lines
    assert any("resumed step 6" in line for line in again.lines)


def rank_steps(run):
    """The newest step that every rank has said to be captured."""
    return max((step for step in run.steps("boundary") if run.steps("boundary").count(step) == 2), default=0)


def check_ranks(trainings, run):
    assert run.end() != 0
    assert "over" not in run.lines
    cut, durable = run.cut()
    captured = rank_steps(run)
    assert captured <= durable < cut, "\n".join(run.lines)
    assert trainings.durable() == durable


@pytest.mark.parametrize(
    ("phase", "at", "told"),
    [
        ("collective", "6", "rank 0"),
        ("collective", "6", "rank 1"),
        ("evaluation", "10", "the launcher"),
        ("step", "4+", "rank 1"),
    ],
)
def test_preemption_of_one_rank_is_that_of_all_and_all_store_the_same_step(phase, at, told, trainings):
    """Each moment once, and in a collective both who waits in it and who is yet to come."""
    run = trainings.start_ranks(phase, at)
    run.await_line(f"{phase} {at.rstrip('+')}")
    os.kill(run.process.pid if told == "the launcher" else run.worker(told), signal.SIGTERM)
    check_ranks(trainings, run)


@pytest.mark.parametrize(
    ("phase", "at", "told"),
    [("collective", "6", "rank 1"), ("step", "4+", "rank 0")],
)
def test_preemption_on_one_node_is_that_on_all_and_all_store_the_same_step(phase, at, told, trainings):
    """Each rank has a keeper of its own: only the link between the two keepers can pass the preemption on. What the
    ranks do meanwhile is tried with one keeper, above.
    """
    run = trainings.start_ranks(phase, at, LAZYSNAP_TEST_NODES="1")
    run.await_line(f"{phase} {at.rstrip('+')}")
    keepers = {trainings.keeper("node-0"), trainings.keeper("node-1")}
    assert None not in keepers
    assert len(keepers) == 2
    os.kill(run.worker(told), signal.SIGTERM)
    check_ranks(trainings, run)


def test_sigusr1_does_the_same(trainings):
    run = trainings.start("plain", "evaluation", "5")
    run.await_line("evaluation 5")
    os.kill(run.pid(), signal.SIGUSR1)
    assert run.end() == ENDED
    assert run.cut() == (6, 5)
    assert trainings.durable() == 5


@pytest.mark.parametrize("way", ["handling", "handling_once"])
def test_a_program_that_handles_the_signal_ends_itself_with_its_own_code(trainings, tmp_path, way):
    run = trainings.start(way, "step", "4")
    run.await_line("step 4")
    os.kill(run.pid(), signal.SIGTERM)
    assert "SIGTERM asks this training to end in step 4; step 3 is durable" in run.await_text("asks this training")
    assert trainings.durable() == 3, "stored while the program still trains"
    (tmp_path / "go").touch()
    assert run.end() == 5
    assert "handled 15 once" in run.lines
    assert trainings.durable() == 4


def test_a_signal_that_the_program_handles_neither_ends_it_nor_hides_one_that_it_does_not(trainings):
    run = trainings.start("printing", "step", "4+")
    run.await_line("step 4")
    os.kill(run.pid(), signal.SIGUSR1)
    run.await_text("SIGUSR1 asks this training to end in step ")
    for _ in range(50):
        run.await_text("boundary ")
    os.kill(run.pid(), signal.SIGTERM)
    check(trainings, run, run.end())
    assert "asked for figures" in run.lines


def test_the_engine_of_an_earlier_training_that_was_not_closed_takes_no_signal_away(trainings):
    run = trainings.start("left_open", "step", "7")
    run.await_line("step 7")
    os.kill(run.pid(), signal.SIGTERM)
    assert run.end() == ENDED
    assert run.cut() == (7, 6)
    assert trainings.durable() == 6


def test_a_program_keeps_its_wakeup_descriptor(trainings):
    run = trainings.start("waking", "step", "5+")
    run.await_line("boundary 5")
    os.kill(run.pid(), signal.SIGTERM)
    check(trainings, run, run.end())
    assert "woken by 15, descriptor kept" in run.lines


def test_a_signal_while_a_training_is_closed_ends_the_program_after_the_close(trainings):
    run = trainings.start("closing", "-", "-", LAZYSNAP_FAULT="level.store.begin:1:hang")
    run.await_line("closing 0")
    run.await_text("waiting for")  # ``close`` says that after three seconds
    os.kill(run.pid(), signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    assert "over" not in run.lines


@pytest.mark.timeout(900)  # a process for each line
@pytest.mark.parametrize("ending", ["close", "abandon"])
def test_no_signal_is_lost_at_any_line_of_the_end_of_a_training(trainings, ending):
    """Some lines come before the end has begun, some right before and right after the handlers are put back."""
    dry = trainings.start("ending", ending, "0", LAZYSNAP_TEST_LEVELS="[]")
    assert dry.end() == 0, dry.lines
    assert dry.lines[-1] == "over"
    [num_lines] = dry.steps("lines")
    assert num_lines > 20

    for number in range(1, num_lines + 1):
        run = trainings.start("ending", ending, str(number), LAZYSNAP_TEST_LEVELS="[]")
        assert run.end() == ENDED, f"at line {number}: {run.lines}"
        assert "over" not in run.lines


@pytest.mark.parametrize("fault", ["", "level.store.begin:1:hang"], ids=["the level works", "the level hangs"])
def test_a_program_that_hangs_while_it_cleans_up_is_ended_in_time(trainings, fault):
    """The training thread was told to end the training, and never does."""
    run = trainings.start("hanging", "step", "5+", LAZYSNAP_TEST_PREEMPTION_S="4", LAZYSNAP_FAULT=fault)
    run.await_line("boundary 5")
    os.kill(run.pid(), signal.SIGTERM)
    run.await_line("cleaning up")
    assert run.process.wait(60) == ENDED
    run.end()
    assert run.cut()[1] == trainings.durable()


def test_a_loop_that_begins_again_stores_its_own_step_not_the_one_that_was_resumed(trainings):
    first = trainings.start("beginning_again", "step", "7")
    first.await_line("step 7")
    os.kill(first.pid(), signal.SIGTERM)
    assert first.end() == ENDED
    assert first.cut() == (7, 6)

    run = trainings.start("beginning_again", "step", "4")
    run.await_line("step 4")
    assert any("resumed step 6" in line for line in run.lines)
    os.kill(run.pid(), signal.SIGTERM)
    assert run.end() == ENDED
    assert run.cut() == (4, 3)
    assert 3 in trainings.all_durable()


def test_a_console_that_nobody_reads_keeps_no_process_alive(trainings):
    run = trainings.start("plain", "step", "6", LAZYSNAP_TEST_PREEMPTION_S="4", LAZYSNAP_TEST_FILLS_PIPE="1")
    run.await_line("step 6")
    run.await_line("full")
    os.kill(run.pid(), signal.SIGTERM)
    assert run.process.wait(60) == ENDED


def test_what_is_not_durable_in_time_is_named_with_the_place_where_it_is(trainings):
    environment = {"LAZYSNAP_TEST_PREEMPTION_S": "4", "LAZYSNAP_FAULT": "level.store.begin:1:hang"}
    run = trainings.start("plain", "step", "6", **environment)
    run.await_line("step 6")
    os.kill(run.pid(), signal.SIGTERM)
    assert run.end() == ENDED
    [line] = [line for line in run.lines if "NOT DURABLE" in line]
    assert "in step 6; NOT DURABLE after 4 s (preemption_timeout_s): step 5 is in the memory of the keeper" in line
    assert f"(process {trainings.keeper()}), which keeps storing it" in line


def test_a_step_that_was_resumed_from_memory_is_durable_before_another_is_captured(trainings):
    run = trainings.start("plain", "step", "6")
    run.await_line("step 6")
    os.kill(run.pid(), signal.SIGKILL)
    run.end()
    again = trainings.start("plain", "before", "0")
    again.await_line("before 0")
    os.kill(again.pid(), signal.SIGTERM)
    assert again.end() == ENDED
    step, durable = again.cut()
    assert durable in (4, 5)  # the capture of step 5 may be torn by SIGKILL
    assert step == durable + 1
    assert trainings.durable() == durable


def test_without_levels_the_line_names_the_memory_that_has_the_step(trainings):
    run = trainings.start("plain", "step", "6", LAZYSNAP_TEST_LEVELS="[]")
    run.await_line("step 6")
    keeper = trainings.keeper()
    os.kill(run.pid(), signal.SIGTERM)
    assert run.end() == ENDED
    end = f"in step 6; step 5 is in the memory of the keeper (process {keeper}): there is no storage level"
    assert [line for line in run.lines if line.endswith(end)], "\n".join(run.lines)


def test_the_keeper_outlives_the_signal_and_stores_what_its_trainer_captured(trainings):
    """Slurm sends a signal to every process of a step."""
    run = trainings.start("plain", "step", "6")
    run.await_line("step 6")
    keeper = trainings.keeper()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(keeper, number)
    os.kill(run.pid(), signal.SIGTERM)
    check(trainings, run, run.end())
    assert run.cut() == (6, 5)


def test_a_forked_child_of_the_training_dies_of_the_signal_as_any_process(trainings):
    run = trainings.start("forking", "step", "4+")
    run.await_line("child ended by 15")
    run.await_line("boundary 20")
    assert not [line for line in run.lines if "ended this training" in line]


@pytest.mark.quick
def test_after_a_training_signals_are_handled_as_before(trainings):
    run = trainings.start("twice", "-", "-")
    assert run.end() == 128 + signal.SIGTERM
    assert [line for line in run.lines if line.startswith("handlers")] == ["handlers as before", "handlers as before"]
