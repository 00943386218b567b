"""Schedules of capture, gate, step and kill on the software device: 90 of a training, 20 of two ranks."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from device import software_device
from device.schedules import INTERVALS, KINDS, STARTS

PROCESSES = 2
DEADLINE_S = 900
REPLAYED = "LAZYSNAP_SCHEDULES"
"""Numbers of chains, with blanks between: these are run and no others. A failure names its own."""


def chosen(first, count):
    """Return the numbers of the chains to run."""
    return [int(number) for number in os.environ.get(REPLAYED, "").split()] or range(first, first + count)


def starts_of(script, chains, place):
    """Run these chains and return the outcome of each start: see ``schedules.py`` and ``ranks.py``."""
    try:
        software_device.built()
    except software_device.CannotBuild as error:
        pytest.skip(str(error))
    chains = sorted(chains, key=lambda chain: chain % len(KINDS))  # each process needs what few kinds end with
    half = -(-len(chains) // PROCESSES)
    words = [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name(script))]
    env = {**os.environ, "LAZYSNAP_TEST_DEVICE": "software"}
    running = [
        subprocess.Popen(
            [*words, f"{place}/{first}", *map(str, chains[first : first + half])],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(0, len(chains), half)
    ]
    texts = [process.communicate(timeout=DEADLINE_S)[0] for process in running]
    assert {process.returncode for process in running} == {0}
    return [json.loads(line) for text in texts for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(software_device.BUILD_DEADLINE_S + DEADLINE_S)
def test_no_schedule_of_capture_gate_step_and_kill_tears_a_snapshot_or_loses_one(tmp_path):
    """Each restart is offered a step of the undisturbed run, bit for bit and not too old. The checker has no report."""
    chains = chosen(100, len(KINDS) * len(INTERVALS))  # each fault point at each of its passes, once

    starts = starts_of("schedules.py", chains, tmp_path)

    wrong = [
        f"{REPLAYED}={start['chain']}: {start}"
        for start in starts
        if start["races"] or start["output"] or not start["is_exact"] or start["resumed"] < start["least"]
    ]
    assert not wrong, "\n".join(wrong[:10])
    assert len(starts) == STARTS * len(chains)
    assert sum(start["resumed"] > 0 for start in starts) > 0.7 * len(starts)


@pytest.mark.slow
@pytest.mark.timeout(software_device.BUILD_DEADLINE_S + DEADLINE_S)
def test_two_ranks_whose_hosts_run_ahead_of_their_devices_go_on_from_one_step_whoever_dies(tmp_path):
    """Gradients are averaged by the devices. Each rank has the slots that devices need: three of its own and one."""
    chains = chosen(8, 2)  # one for each interval

    starts = starts_of("ranks.py", chains, tmp_path)

    wrong = [
        f"{REPLAYED}={start['chain']}: {start}"
        for start in starts
        if len({told["resumed"] for told in start["ranks"]}) > 1
        or any(told["races"] or told["output"] or not told["is_exact"] for told in start["ranks"])
        or start["ranks"][0]["resumed"] < start["least"]
    ]
    assert not wrong, "\n".join(wrong[:10])
    assert len(starts) == STARTS * len(chains)
    assert sum(start["ranks"][0]["resumed"] > 0 for start in starts) > 0.7 * len(starts)
    slots = {(start["every"], told["slots"]) for start in starts for told in start["ranks"] if told["slots"]}
    assert slots <= {(1, 4), (2, 3)}
    assert slots
