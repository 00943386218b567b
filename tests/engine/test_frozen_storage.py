"""Snapshots of a fine-tuning get to storage however training ends, not only when it ends well."""

import pathlib

import pytest
from support.catalogue import inventory_of
from tuning import TIMEOUT_S, Tuning, keeper_gone, keeper_of

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.levels import open_store

pytestmark = pytest.mark.slow


def start(job, url):
    """Between two snapshots on storage many are in memory only."""
    levels = (PersistentLevel(str(url), every_n_steps=1000),)
    tuning = Tuning(SnapshotConfig(job_id=job.job_id, levels=levels, memory=MemoryLevel(linger_s=1)), width=512)
    job.trainings.append(tuning)
    assert tuning.engine._wait_ready(TIMEOUT_S)
    return tuning


def stored(url):
    return sorted(entry.step for entry in inventory_of(open_store(str(url))).entries)


def test_a_training_that_fails_leaves_its_newest_snapshot_on_storage(job, tmp_path):
    tuning = start(job, tmp_path)
    last = 0
    for _ in range(6):
        last = tuning.run_until_captured(last + 1)
    keeper = keeper_of(tuning)

    tuning.engine.abandon()
    keeper_gone(keeper)

    assert stored(tmp_path)[-1] == last
    fresh = start(job, tmp_path)
    assert fresh.engine.restore("latest").step == last
    assert fresh.facts() == tuning.held[last]


@pytest.mark.parametrize("how", ["abandon", "close"])
def test_an_end_of_training_reads_no_byte_of_the_frozen_tensors(zygote, tmp_path, how):
    """A base of many gigabytes must not hold up the end: here each read of it is a segmentation fault."""
    program = pathlib.Path(__file__).with_name("unreadable_base.py")

    assert zygote.run([str(program), how], {"LAZYSNAP_JOB_ID": str(tmp_path)}, tmp_path / "output") == 0

    assert (tmp_path / "output").read_text().splitlines()[-1] == "left"


def test_a_snapshot_that_is_named_after_the_fact_is_stored_while_training_goes_on(job, tmp_path):
    tuning = start(job, tmp_path)
    first = tuning.run_until_captured(1)
    assert tuning.engine.wait(first, until="durable", timeout_s=TIMEOUT_S)
    last = tuning.run_until_captured(first + 1)

    assert tuning.engine.keep("warm") == last
    keeper = keeper_of(tuning)
    tuning.engine.abandon()
    keeper_gone(keeper)

    assert start(job, tmp_path).engine._fetch("warm").step == last
