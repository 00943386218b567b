"""A training that starts again elsewhere, and then here, where its keeper still lives."""

import pathlib

import pytest
from keeper_jobs import until
from node_jobs import RUN, Lead, Member, image_of

from lazysnap.levels import open_store
from lazysnap.levels.belongings import Told
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.source import MemorySource
from lazysnap.shard.manifest import CaptureMeta

FIRST, ELSEWHERE, SECOND = ("0000000000000001", "0000000000000002", "0000000000000003")


@pytest.fixture
def lead(tmp_path):
    """The first of two ranks, each with files of its own."""
    member = Member(tmp_path, aggregate="rank", keep_last=1)
    lead = Lead(member)
    lead.url = pathlib.Path(member.url)
    yield lead
    lead.close()


def train(lead, step, generation):
    lead.adopt(step, pin=True, generation=generation)
    assert until(lambda: step in lead.told("sound"))
    lead.persister.tell(str(lead.url), Told(RUN, generation, (step,)))
    assert until(lead.persister.is_drained)


def write_elsewhere(lead, step):
    """What another keeper of the same rank wrote there meanwhile."""
    image = image_of(0, step)
    room = map_anonymous(-(-len(image) // 4096) * 4096)
    room[: len(image)] = image
    meta = CaptureMeta(RUN, 1, step, 0, 2, 3, generation=ELSEWHERE)
    open_store(str(lead.url)).write(meta, MemorySource(room, len(image)))


def test_what_was_written_elsewhere_between_two_starts_goes_and_what_was_left_half_written(lead):
    train(lead, 1, FIRST)
    train(lead, 2, FIRST)  # now it knows what is there
    write_elsewhere(lead, 3)
    write_elsewhere(lead, 4)
    next((lead.url / "step-00000004").glob("*.json")).unlink()

    train(lead, 5, SECOND)

    assert sorted(path.parent.name for path in lead.url.rglob("*.safetensors")) == ["step-00000005"]
