"""One of two ranks reads back damaged what it wrote: that is no snapshot, and it does not fill the disk either."""

import pathlib

import pytest
from frozen_damage import SHARD, flip, frozen_at, truncate
from node_jobs import RUN, START, Lead, Member, frozen_slot
from support.names import directory_of
from support.waiting import until

from lazysnap.keeper.protocol import Durable, LevelFailed, Sound, Surplus
from lazysnap.levels.belongings import Told


@pytest.fixture
def lead(tmp_path):
    """Its persister in this process, at a level where each rank has its own file; step 1 is sound at all of them."""
    member = Member(tmp_path, keep_last=1)
    lead = Lead(member)
    lead.url = pathlib.Path(member.url)
    yield lead
    lead.close()


def begin(lead, **settings):
    lead.adopt(1, pin=True, **settings)
    assert until(lambda: lead.told(Sound) == [1])
    lead.persister.tell(str(lead.url), Told(RUN, START, (1,)))


def damage(lead, flip_one):
    """From now on, whatever is committed."""

    def emit(event):
        if isinstance(event, Durable):
            flip_one(event.step)
        lead.events.append(event)

    lead.persister.emit = emit


def capture(lead, *steps, **settings):
    for step in steps:
        lead.adopt(step, pin=True, **settings)
        assert until(lambda step=step: step in lead.told(LevelFailed))
        assert until(lead.persister.is_drained)
        del lead.slots[:-1]  # so many more wait for other ranks
    assert until(lead.persister.is_drained)
    assert lead.told(LevelFailed) == list(steps)


def shards(lead):
    return sorted(path.parent.name for path in lead.url.rglob("*.safetensors"))


def test_the_bytes_of_shards_that_are_always_read_back_damaged_go_at_once(lead):
    begin(lead)
    damage(lead, lambda step: flip(next((lead.url / directory_of(step, RUN, START)).glob("*.safetensors"))))

    capture(lead, 2, 3, 4)

    assert shards(lead) == [directory_of(1, RUN, START)]
    assert not (lead.url / directory_of(4, RUN, START)).exists()


def test_shards_whose_frozen_tensors_are_always_damaged_are_offered_to_be_taken_back(lead):
    slot, reference = frozen_slot(b"a" * 7000)
    lead.frozen[reference.digest] = slot
    begin(lead, frozen=reference)
    damage(lead, lambda _: truncate(frozen_at(lead.url) / SHARD))

    capture(lead, 2, 3, 4, 5, 6, 7, 8, frozen=reference)

    assert lead.told(Surplus) == [2, 3]
    slot.close()
