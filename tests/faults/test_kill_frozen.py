"""Deaths around the frozen tensors of a fine-tuning: a restart ends as if nothing had happened."""

import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.catalogue import inventory_of
from support.waiting import until

from lazysnap.levels import open_store

TUNING = pathlib.Path(__file__).parents[1] / "engine" / "tuning.py"
STEPS = 6
WIDTH = 512


def run(zygote, place, fault=None, every=1, linger_s=30):
    """Train in ``place``; the exit status and the journal's lines of this run."""
    place.mkdir(exist_ok=True)
    journal = place / "journal"
    before = len(journal.read_text().splitlines()) if journal.exists() else 0
    environment = {"LAZYSNAP_JOB_ID": str(place), **({"LAZYSNAP_FAULT": fault} if fault else {})}
    arguments = [str(TUNING), str(place / "snapshots"), str(STEPS), str(journal), *map(str, (WIDTH, every, linger_s))]
    status = zygote.run(arguments, environment, place / "output")
    lines = journal.read_text().splitlines() if journal.exists() else []
    return status, [line.split() for line in lines[before:]], (place / "output").read_text()[-2000:]


def told(events, what):
    return next((line[1:] for line in events if line[0] == what), None)


@pytest.fixture(scope="module")
def wanted(zygote, tmp_path_factory):
    status, events, output = run(zygote, tmp_path_factory.mktemp("tuning") / "straight")
    assert status == 0, output
    return told(events, "end")


def death(zygote, place, fault, wanted):
    """Run into the fault, then again; what went wrong, and what the two runs told."""
    status, first, output = run(zygote, place, fault)
    if status not in (0, -9):
        return f"{fault}: ended with {status}: {output}"
    status, second, output = run(zygote, place)
    if status != 0:
        return f"{fault}: the restart ended with {status}: {output}"
    if told(second, "end") != wanted:
        return f"{fault}: the end differs: {first} {second}"
    captured = [int(line[1]) for line in first if line[0] == "begun"]
    resumed, level = told(second, "resumed")
    if captured and fault.endswith(":kill") and not told(first, "end"):
        images = told(first, "image"), told(second, "image")
        # One step may have been in flight. What was whole in memory is used as it is.
        if int(resumed) < captured[-1] - 1 or (level == "memory" and images[0] != images[1]):
            return f"{fault}: {first} {second}"
    return None


@pytest.mark.timeout(300)
def test_a_death_while_the_image_is_made_or_later_loses_no_bit(zygote, wanted, tmp_path):
    faults = [
        *(
            f"engine.frozen.{point}:1:{what}"
            for point in ("begun", "copied", "committed")
            for what in ("kill", "kill-both")
        ),
        "keeper.frozen.make:1:kill-both",
        "engine.begun:4:kill",
        "capture.commit:4:kill",
        "capture.commit:3:kill-both",
    ]

    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        found = list(pool.map(lambda item: death(zygote, tmp_path / str(item[0]), item[1], wanted), enumerate(faults)))

    assert [problem for problem in found if problem] == []


@pytest.mark.parametrize("point", ["begun", "copied", "committed"])
def test_a_keeper_that_dies_while_it_gets_the_image_is_replaced(zygote, wanted, tmp_path, point):
    status, events, output = run(zygote, tmp_path / "job", f"engine.frozen.{point}:1:kill-peer")

    assert status == 0, output
    assert told(events, "end") == wanted
    assert told(events, "image")[1] == "1"
    assert ["begun", str(STEPS)] in events


def test_a_killed_training_leaves_on_storage_what_it_had_in_memory(zygote, wanted, tmp_path):
    """Only the first step was due at the level; memory ends soon after the trainer."""
    place = tmp_path / "job"
    status, first, output = run(zygote, place, "engine.begun:5:kill", every=1000, linger_s=0)
    assert status == -9, output
    captured = [int(line[1]) for line in first if line[0] == "begun"]
    store = open_store(str(place / "snapshots"))
    until(lambda: max((entry.step for entry in inventory_of(store).entries), default=0) >= captured[-1])

    status, second, output = run(zygote, place)

    assert status == 0, output
    assert int(told(second, "resumed")[0]) >= captured[-1]
    assert told(second, "end") == wanted
