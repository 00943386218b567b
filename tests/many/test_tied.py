"""Tied weights of several ranks: stored once by all of them together, tied again in any other world."""

import pytest
from support.catalogue import inventory_of

from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.store import open_storage

NAMES = {"model.embed.weight", "model.head.weight"}


def stored(job):
    """By rank: which of the tied names stand in the shard, and which are told to be another one."""
    storage = open_storage(job.levels[0]["url"])
    entries = inventory_of(storage).entries
    newest = max(entry.step for entry in entries)
    found = {}
    for entry in (entry for entry in entries if entry.step == newest):
        manifest = FilePlace.of(storage, entry).read_manifest()
        path = job.root / "level" / FilePlace.of(storage, entry).file_path
        shard = manifest.of(entry.rank)
        layout = shard.layout(path.read_bytes()[shard.offset :], str(path))
        names = {spec.name for spec in layout.specs}
        found[entry.rank] = (NAMES & names, {name: shard.meta.aliases.get(name) for name in NAMES - names})
        assert set(shard.meta.tensors) <= names
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_tied_weights_are_stored_once_and_come_back_tied(job, end_keepers, kind):
    """In another world: ``test_other_world.py``."""
    assert set(job.run(kind, 2, tied=True, stop_at=4, wait_durable=True)) == {9}, job.output()
    [before] = job.stopped()
    for names, others in stored(job).values():
        assert names <= {"model.embed.weight"}
        if names:
            assert others == {"model.head.weight": "model.embed.weight"}
    assert any(names for names, _ in stored(job).values())
    end_keepers(job)

    assert set(job.run(kind, 2, tied=True, look=True)) == {0}, job.output()

    assert job.origins() == [["4", job.levels[0]["url"], before]] * 2
