"""A training that starts again elsewhere, and then here, where its keeper still lives."""

import pathlib

import pytest
from support.listing import files_below
from support.names import directory_of
from support.node_rig import RUN, STARTS, check, steps_at
from support.snapshots import Snapshot
from support.waiting import until

from lazysnap.config import PersistentLevel
from lazysnap.events import Complete
from lazysnap.levels import open_store
from lazysnap.levels.storage import Storage

pytestmark = pytest.mark.slow

FIRST, ELSEWHERE, SECOND, THIRD = STARTS[:4]


@pytest.fixture
def level(tmp_path):
    return PersistentLevel(tmp_path / "level", every_n_steps=1, keep_last=1)


@pytest.fixture
def rig(rig, level):
    return rig(level, start=None, ranks=2)


def write(level, step, start, rank):
    """What another keeper wrote there."""
    Snapshot(step, RUN, rank=rank, world_size=2, start=start).write(open_store(level.url))


def directories(level):
    return sorted({path.parent.name for path in files_below(level.url, "*.safetensors")})


def test_what_was_written_elsewhere_between_two_starts_goes_and_what_is_half_written_a_day_later(
    rig, level, monkeypatch
):
    rig.begin(FIRST)
    assert [rig.store() for _ in range(2)] == [2, 4]
    for rank in (0, 1):
        write(level, 1, ELSEWHERE, rank)
    write(level, 3, ELSEWHERE, 0)
    next((pathlib.Path(level.url) / directory_of(3, RUN, ELSEWHERE)).glob("*.json")).unlink()

    rig.begin(SECOND, stored={level.url: [(ELSEWHERE, 1)]})
    half = directory_of(3, RUN, ELSEWHERE)
    newest = [rig.store() for _ in range(3)][-1]
    assert newest == 6
    assert until(lambda: directories(level) == sorted([half, directory_of(6, RUN, SECOND)])), "a copy on its way?"

    monkeypatch.setattr(Storage, "abandoned_after_s", -3600.0)
    rig.begin(THIRD, stored={level.url: [(SECOND, 6)]})
    newest = [rig.store() for _ in range(4)][-1]
    assert newest == 8
    assert until(lambda: directories(level) == [directory_of(8, RUN, THIRD)])


def test_nothing_is_deleted_while_a_trainer_chooses_what_to_go_on_with(rig, level):
    rig.begin(FIRST)
    assert rig.store() == 2
    rig.ranks[0].is_choosing = True
    assert [rig.store() for _ in range(3)] == [4, 6, 8]

    assert steps_at(level) == [2, 4, 6, 8]
    rig.ranks[0].is_choosing = False
    assert until(lambda: steps_at(level) == [8])


def is_whole(level, entry):
    """False if it was deleted, because a newer one is complete by now."""
    try:
        check(level, entry)
    except FileNotFoundError:
        return False
    return True


def test_a_slot_of_another_rank_is_not_stored_under_the_names_of_the_crew(rig, level):
    rig.begin(FIRST)
    first, second = rig.ranks
    first.rank, second.rank = 1, 0
    strange = rig.train()
    first.rank, second.rank = 0, 1
    rig.train_until(lambda: rig.complete(level))

    assert strange not in rig.complete(level)
    until(lambda: is_whole(level, rig.complete(level)[0]))


def test_what_cannot_be_told_is_told_with_what_comes_next(rig, level):
    class Ear(list):
        is_deaf = True

        def append(self, message):
            if self.is_deaf and isinstance(message, Complete):
                self.is_deaf = False
                raise RuntimeError("nobody foresaw it")
            super().append(message)

    rig.ears = Ear
    rig.begin(FIRST)
    first = rig.train()
    assert until(lambda: not rig.told_to[0].is_deaf)
    second = rig.store()

    assert rig.complete(level) == [first, second]
