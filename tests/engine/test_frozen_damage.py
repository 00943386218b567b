"""The stored frozen tensors are damaged while a real training with a real keeper goes on."""

import os

import pytest
from frozen_damage import damage
from small_training import fetch_stored
from support.catalogue import inventory_of
from support.waiting import until
from test_frozen import FrozenStarter, matches
from tuning import TIMEOUT_S

from lazysnap.levels.store import open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def job():
    starter = FrozenStarter()
    yield starter
    starter.clean_up()


def run_until_durable(tuning, step):
    """Train until a snapshot is durable; its step."""
    step = tuning.run_until_captured(step)
    assert tuning.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
    return step


def check_whole(tuning, root):
    """Every snapshot that is left there can be restored, and is right."""
    store = open_store(str(root))
    # The keeper may still delete an older one.
    until(lambda: not inventory_of(store).problems, lambda: str(inventory_of(store).problems))
    inventory = inventory_of(store)
    for entry in [*inventory.entries, *inventory.frozen]:
        store.verify(store.place(entry))
    return [entry.step for entry in inventory.entries]


def test_later_snapshots_can_be_restored_and_older_ones_again(job, tmp_path):
    tuning = job.start(tmp_path)
    first = run_until_durable(tuning, 1)
    damage(tmp_path, "the shard is truncated")

    last = run_until_durable(tuning, first + 1)

    assert tuning.engine.close()
    assert tuning.engine.statistics().level_failures == {}
    assert sorted(check_whole(tuning, tmp_path)) == [first, last]
    snapshot = fetch_stored(job.start(tmp_path, ready=False).engine)
    assert snapshot.step == last
    assert matches(tuning, snapshot)


@pytest.mark.parametrize(
    ("how", "width"), [("the shard is truncated", 2200), ("a bit of the manifest is flipped", 512)]
)
def test_a_restart_from_a_slower_level_repairs_the_faster_one(job, tmp_path, how, width):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    tuning = job.start(fast, slow, width=width)
    first = run_until_durable(tuning, 1)
    assert tuning.engine.close()
    damage(fast, how)

    second = job.start(fast, slow, ready=False, width=width)
    snapshot = second.engine.restore("latest")
    assert snapshot.step == first
    assert matches(tuning, snapshot)
    assert second.engine._wait_ready(TIMEOUT_S)
    last = run_until_durable(second, first + 1)
    assert second.engine.close()

    assert second.engine.statistics().level_failures == {}
    assert last in check_whole(second, fast)
    assert last in check_whole(second, slow)


def test_a_keeper_that_is_killed_while_it_replaces_them_leaves_what_the_next_one_mends(job, tmp_path, monkeypatch):
    # The keeper of this training inherits it; of the shards that it writes the fourth is the image again.
    monkeypatch.setenv("LAZYSNAP_FAULT", "level.store.commit:4:kill")
    tuning = job.start(tmp_path)
    monkeypatch.delenv("LAZYSNAP_FAULT")
    step = run_until_durable(tuning, 1)
    step = run_until_durable(tuning, step + 1)
    pid = tuning.engine._client.keeper_pid
    damage(tmp_path, "the shard is truncated")

    step = tuning.run_until_captured(step + 1)
    until(lambda: tuning.engine.statistics().keepers_lost == 1)
    assert not os.path.exists(f"/proc/{pid}/exe")

    last = run_until_durable(tuning, step + 1)
    assert tuning.engine.close()
    assert last in check_whole(tuning, tmp_path)
    assert matches(tuning, fetch_stored(job.start(tmp_path, ready=False).engine))
