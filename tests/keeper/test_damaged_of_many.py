"""One of two ranks reads back damaged what it wrote: that is no snapshot, and it does not fill the disk either."""

import threading

import pytest
from frozen_damage import SHARD, flip, frozen_at, truncate
from support.listing import files_below
from support.node_rig import check, frozen_slot, steps_at
from support.waiting import until

from lazysnap.config import PersistentLevel


def when_committed(work):
    """Before it is read back; one at a time."""
    one_at_a_time = threading.Lock()

    def passed(name):
        if name == "keeper.persist.committed":
            with one_at_a_time:
                work()

    return passed


def flip_new(trainer, level, flipped):
    """What the last node committed since, but for step 2."""
    last = f"node-{len(trainer.nodes) - 1:05d}-of-{len(trainer.nodes):05d}.safetensors"
    for path in set(files_below(level.url, last)) - flipped:
        if path.parent != trainer.directory(level, 2) and path.with_suffix(".json").exists():
            flipped.add(path)
            flip(path)


def files(level, pattern):
    return [path.parent.name for path in files_below(level.url, pattern)]


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"ranks": 2}, {"nodes": 2}], ids=str)
def test_shards_that_are_always_read_back_damaged_go_and_what_was_whole_stays(
    rig, crew, tmp_path, passing, monkeypatch
):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)
    trainer = rig(level, **crew)
    assert trainer.store() == 2
    seen, flipped = [], set()

    def flip_one():
        flip_new(trainer, level, flipped)
        seen.append(len(files(level, "*.safetensors")))

    passing(when_committed(flip_one))
    node = len(trainer.nodes) - 1
    trainer.train_until(lambda: len(trainer.failed(node=node)) > 3)

    assert trainer.complete(level) == [2]
    check(level, 2)
    # One step that is whole, one that is being written, and one for which the level was not well yet.
    assert max(seen) <= 3 * len(trainer.nodes)
    monkeypatch.undo()
    trainer.train_until(lambda: len(trainer.complete(level)) > 1)
    assert until(lambda: steps_at(level) == trainer.complete(level)[-1:])
    check(level, trainer.complete(level)[-1])
    assert until(lambda: len(files(level, "*.safetensors")) == len(trainer.nodes))


@pytest.mark.slow
def test_snapshots_whose_frozen_tensors_are_always_read_back_damaged_go(rig, tmp_path, passing, monkeypatch):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)
    slot, reference = frozen_slot()
    trainer = rig(level, ranks=2, frozen={reference.digest: slot})
    assert trainer.store(frozen=reference) == 2
    passing(when_committed(lambda: truncate(frozen_at(level.url) / SHARD)))

    trainer.train_until(lambda: len(trainer.failed()) > 2, frozen=reference)

    assert trainer.complete(level) == [2]
    assert 2 in steps_at(level)
    monkeypatch.undo()
    trainer.train_until(lambda: len(trainer.complete(level)) > 1, frozen=reference)
    assert until(lambda: steps_at(level) == trainer.complete(level)[-1:])
    slot.close()
