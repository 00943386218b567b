"""Killed by SIGKILL in the middle of a step, a training of two processes goes on as if nothing had happened."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from accelerated import OF_RANKS
from support.cuts import merged
from support.ports import free_port
from support.traced import LENGTH
from support.zygote import ended

SCRIPT = str(Path(__file__).with_name("accelerated.py"))
WORLD = 2
MOST_STARTS = 40
TIMEOUT_S = 120


def start(zygote, directory, case, dies_after, seed):
    """Run all ranks; ``dies_after``: by rank.

    Their statuses, where they resumed, what each wrote, what they said.

    As a launcher does, the first one that fails takes the others along.
    """
    directory.mkdir(exist_ok=True)
    port = free_port()
    world = len(dies_after)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    children = []
    for rank, dies in enumerate(dies_after):
        trace_of(directory, rank, world).unlink(missing_ok=True)
        environment = {name: str(value) for name, value in {**meeting, "RANK": rank, "LOCAL_RANK": rank}.items()}
        arguments = [SCRIPT, str(directory), case, str(dies), str(seed)]
        children.append(zygote.start(arguments, environment, directory / f"output.{rank}"))
    statuses = ended(children, TIMEOUT_S)
    text = "\n".join(f"--- {rank}\n{(directory / f'output.{rank}').read_text()}" for rank in range(world))
    traces = []
    for rank in range(world):
        path = trace_of(directory, rank, world)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert lines, text
        traces.append(lines)
    heads = [lines[0] for lines in traces]
    assert all(head["resumed"] == heads[0]["resumed"] for head in heads), text
    return statuses, heads[0], [lines[1:] for lines in traces], text


def trace_of(directory, rank, world):
    return directory / ("trace" if world == 1 else f"trace.{rank}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "first"),
    [
        ("Plain", 1),
        ("Accumulated", 2),
        *((name, 1 + number % 2) for number, name in enumerate(OF_RANKS) if name not in ("SeedableSampler", "Joined")),
    ],
)
def test_one_of_two_processes_killed_again_and_again_they_end_bit_for_bit_as_uninterrupted(
    zygote, tmp_path, case, first
):
    """Deaths in every step are tried with one process."""
    statuses, _, whole, text = start(zygote, tmp_path / "whole", case, [0] * WORLD, 1)
    assert statuses == [0] * WORLD, text

    traces, cuts = [[] for _ in range(WORLD)], set()
    for number in range(MOST_STARTS):
        victim = number % WORLD
        # At least two steps each: the capture of one that ended just before the death may be lost.
        steps = (2 if case == "Accumulated" else 5) if number else first
        dies_after = [steps if rank == victim else 0 for rank in range(WORLD)]
        statuses, head, lines, text = start(zygote, tmp_path / "cut", case, dies_after, number + 1)
        done = min(max((line["step"] for line in trace if "step" in line), default=0) for trace in traces)
        assert (head["resumed"] or 0) >= done - 1, text
        assert head["level"] == ("memory" if head["resumed"] else None)
        traces = [merged(trace, head["resumed"], after) for trace, after in zip(traces, lines, strict=True)]
        for trace, wanted in zip(traces, whole, strict=True):
            assert trace == wanted[: len(trace)], text
        if statuses == [0] * WORLD:
            break
        assert statuses[victim] == -signal.SIGKILL, text
        cuts.add(lines[victim][-1].get("step", 0) if lines[victim] else 0)
    assert traces == whole
    assert len(cuts) >= 2
    assert (head["kind"] == "FSDP") == (case == "Fsdp2")


@pytest.mark.timeout(300)
def test_where_one_process_has_more_batches_they_go_on_from_the_last_epoch_that_all_ended(zygote, tmp_path):
    statuses, _, whole, text = start(zygote, tmp_path / "whole", "Joined", [0, 0], 1)
    assert statuses == [0, 0], text
    assert [sum(line.get("epoch") == 0 for line in lines) for lines in whole] == [4, 3]

    statuses, *_ = start(zygote, tmp_path / "cut", "Joined", [0, 5], 1)
    assert statuses[1] == -signal.SIGKILL
    statuses, head, after, text = start(zygote, tmp_path / "cut", "Joined", [0, 0], 2)
    assert statuses == [0, 0], text
    assert head["resumed"] == 4
    assert after == [[line for line in lines if line.get("epoch") != 0] for lines in whole]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2)])
def test_with_another_number_of_processes_weights_are_exact_and_the_epoch_goes_on(zygote, tmp_path, then, now):
    statuses, _, before, text = start(zygote, tmp_path, "SeedableSampler", [2] + [0] * (then - 1), 1)
    assert statuses[0] == -signal.SIGKILL, text
    statuses, head, after, text = start(zygote, tmp_path, "SeedableSampler", [0] * now, 2)
    assert statuses == [0] * now, text

    step = head["resumed"]
    [resumed] = [line for line in before[0] if line.get("step") == step]
    assert head["weights"] == resumed["weights"]
    assert head["steps"] == step
    assert text.count(f"captured by {then} rank{'s' * (then > 1)} and is resumed by {now}:") == 1
    # Of the same order, what was trained is passed over, in whole batches of all processes.
    given = [number for lines in before for line in lines if line["step"] <= step for number in line["ids"]]
    rest = [number for lines in after for line in lines if line.get("epoch") == 0 for number in line["ids"]]
    assert set(given + rest) == set(range(LENGTH))
    assert (len(given + rest) == LENGTH) == (then > now)
    assert [line["iteration"] for line in after[0] if "evaluated" in line] == [1, 2, 3]
    draws = [line["draw"] for lines in after for line in lines if "draw" in line]
    assert len(set(draws)) == len(draws)


def segments(path):
    """What each start of a rank wrote into one file: its first line, and the others."""
    found = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "resumed" in line:
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_launcher_starts_them_again(zygote, forking_python, tmp_path):
    statuses, _, whole, text = start(zygote, tmp_path / "whole", "Plain", [0] * WORLD, 1)
    assert statuses == [0] * WORLD, text
    directory = tmp_path / "cut"
    directory.mkdir()
    # With --cpu it starts one process alone, unless there is an mpirun; the script asks for no GPU itself.
    command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    command += ["--multi_gpu", "--gpu_ids", "all", "--num_processes", str(WORLD), "--no_python"]
    command += ["--main_process_port", str(free_port())]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    # Every start dies after 6 steps more; the second or third has fewer left.
    program = [forking_python, *command, forking_python, SCRIPT, str(directory), "Plain", "6", "1"]
    status, number = None, -1
    while status != 0 and number < 3:
        number += 1
        with (directory / "output").open("w") as output:
            done = subprocess.Popen(program, stdout=output, stderr=output)
            try:
                status = done.wait(120)
            finally:
                done.terminate()  # it takes its processes along
    text = (directory / "output").read_text()
    assert status == 0, text
    assert number > 0

    for rank in range(WORLD):
        trace, starts = [], segments(trace_of(directory, rank, WORLD))
        assert [head["level"] for head, _ in starts] == [None] + ["memory"] * number, text
        for head, lines in starts:
            trace = merged(trace, head["resumed"], lines)
        assert trace == whole[rank]
