"""The settings that keepers get say what the user configured, for this node."""

from types import SimpleNamespace

import pytest

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.core.messages import RedundancySettings
from lazysnap.engine.job_settings import job_settings, num_slots
from lazysnap.topology import places


def world_of(nodes, rank=0, *, runs_ahead=False):
    found = places(nodes)
    node_ranks = [place.rank for place in found if place.node == nodes[rank]]
    return SimpleNamespace(
        nodes=nodes, node_ranks=node_ranks, size=len(found), place=found[rank], runs_ahead=runs_ahead
    )


def test_the_settings_name_the_ranks_of_the_node_and_the_levels_that_all_nodes_share():
    config = SnapshotConfig(
        levels=(PersistentLevel("/local", every_n_steps=5), PersistentLevel("s3://b/run", keep_last=4)), every_n_steps=2
    )
    redundancy = RedundancySettings(members=(0, 1))
    world = world_of(["a", "b", "a", "b"], rank=3)

    settings = job_settings(config, world, "12" * 8, redundancy=redundancy, shared=["s3://b/run"])

    assert (settings.ranks, settings.world_size, settings.node, settings.num_nodes) == ((1, 3), 4, 1, 2)
    assert (settings.capture_every_n_steps, settings.num_kept, settings.redundancy) == (2, 1, redundancy)
    local, remote = settings.levels
    assert (local.every_n_steps, local.is_shared) == (5, False)
    assert (remote.every_n_steps, remote.every_s, remote.keep_last, remote.is_shared) == (None, 300.0, 4, True)


def test_one_node_shares_its_levels_with_itself():
    config = SnapshotConfig(levels=(PersistentLevel("/local"),))
    [level] = job_settings(config, world_of(["a"]), "12" * 8, redundancy=None, shared=[]).levels
    assert level.is_shared


@pytest.mark.parametrize(
    ("config", "ranks", "is_redundant", "slots"),
    [
        ({}, 1, False, 2),
        ({"levels": (PersistentLevel("/a"),)}, 1, False, 3),
        ({"levels": (PersistentLevel("/a"),)}, 2, False, 4),
        ({"levels": (PersistentLevel("/a"),)}, 2, True, 4),
        ({}, 2, True, 4),
        ({"every_n_steps": 2}, 2, False, 2),
    ],
)
def test_a_rank_has_the_slots_that_the_argument_asks_for(config, ranks, is_redundant, slots):
    world = world_of(["a"] * ranks)
    assert num_slots(SnapshotConfig(job_id="x", **config), world, is_redundant=is_redundant) == slots
