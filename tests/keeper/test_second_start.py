"""A training that starts again elsewhere, and then here, where its keeper still lives."""

import pathlib

import pytest
from node_jobs import RUN, Lead, Member, image_of
from support.names import directory_of
from support.waiting import until

from lazysnap.keeper.protocol import Sound
from lazysnap.levels import open_store
from lazysnap.levels.belongings import Told
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.source import MemorySource
from lazysnap.levels.storage import Storage
from lazysnap.shard.manifest import CaptureMeta

FIRST, ELSEWHERE, SECOND, THIRD = (f"000000000000000{number}" for number in range(1, 5))


@pytest.fixture
def lead(tmp_path):
    """The first of two ranks, each with files of its own."""
    member = Member(tmp_path, keep_last=1)
    lead = Lead(member)
    lead.url = pathlib.Path(member.url)
    yield lead
    lead.close()


def train(lead, step, start):
    lead.adopt(step, pin=True, start=start)
    assert until(lambda: step in lead.told(Sound))
    lead.persister.tell(str(lead.url), Told(RUN, start, (step,)))
    assert until(lead.persister.is_drained)


def write_elsewhere(lead, step):
    """What another keeper of the same rank wrote there meanwhile."""
    image = image_of(0, step)
    room = map_anonymous(-(-len(image) // 4096) * 4096)
    room[: len(image)] = image
    meta = CaptureMeta(RUN, ELSEWHERE, step, 0, 2, 3)
    open_store(str(lead.url)).write(meta, MemorySource(room, len(image)))


def test_what_was_written_elsewhere_between_two_starts_goes_and_what_is_half_written_a_day_later(lead, monkeypatch):
    train(lead, 1, FIRST)
    train(lead, 2, FIRST)  # now it knows what is there
    write_elsewhere(lead, 3)
    write_elsewhere(lead, 4)
    next((lead.url / directory_of(4, RUN, ELSEWHERE)).glob("*.json")).unlink()

    train(lead, 5, SECOND)
    found = [path.parent.name for path in lead.url.rglob("*.safetensors")]
    assert sorted(found) == [directory_of(4, RUN, ELSEWHERE), directory_of(5, RUN, SECOND)], (
        "it may be a copy on its way"
    )

    monkeypatch.setattr(Storage, "abandoned_after_s", -3600.0)
    train(lead, 6, THIRD)
    assert sorted(path.parent.name for path in lead.url.rglob("*.safetensors")) == [directory_of(6, RUN, THIRD)]
