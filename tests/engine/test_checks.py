"""Ranks that are configured otherwise than the others are told so, all of them, when the engine is made."""

import dataclasses

import pytest

from lazysnap import MemoryLevel, PersistentLevel, Redundancy, SnapshotConfig
from lazysnap.errors import ConfigError
from lazysnap.ranks.checks import MAY_DIFFER, check_alike, common_settings


def settings(*levels, **others):
    return common_settings(SnapshotConfig(levels=levels, **others))


def test_ranks_with_disks_of_their_own_are_alike():
    """Neither the place nor the pace counts: a rank that differs in something else is told of that alone."""
    levels = [PersistentLevel(f"/disk{rank}", max_bytes_per_s=1000 + rank) for rank in range(4)]
    check_alike([settings(level) for level in levels])

    levels[3] = dataclasses.replace(levels[3], keep_last=9)
    with pytest.raises(ConfigError, match="keep_last is 2 and 9") as raised:
        check_alike([settings(level) for level in levels])
    assert "disk" not in str(raised.value)
    assert "max_bytes_per_s" not in str(raised.value)


def test_what_may_differ_is_listed_and_exists():
    names = {f"memory.{field.name}" for field in dataclasses.fields(MemoryLevel)}
    names |= {f"levels[].{field.name}" for field in dataclasses.fields(PersistentLevel)}
    names |= {f"redundancy.{field.name}" for field in dataclasses.fields(Redundancy)}
    names |= {field.name for field in dataclasses.fields(SnapshotConfig)} - {"levels"}

    assert set(MAY_DIFFER) <= names
    compared = {name.replace("[0]", "[]") for name in settings(PersistentLevel("/x"), redundancy=Redundancy())}
    assert compared.isdisjoint(MAY_DIFFER)
    assert names <= compared | set(MAY_DIFFER)


def test_the_name_of_a_job_may_come_from_the_environment(monkeypatch):
    named = settings(PersistentLevel("/x"), job_id="mine")
    monkeypatch.setenv("LAZYSNAP_JOB_ID", "mine")
    check_alike([named, settings(PersistentLevel("/x"))])
    monkeypatch.setenv("LAZYSNAP_JOB_ID", "other")

    with pytest.raises(ConfigError, match="job_id is 'mine' and 'other'"):
        check_alike([named, settings(PersistentLevel("/x"))])


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (settings(PersistentLevel("/x"), every_n_steps=3), "every_n_steps is 1 and 3"),
        (settings(), "number of levels is 1 and 0"),
        (settings(PersistentLevel("/x", keep_last=9)), "levels[0].keep_last is 2 and 9"),
        (settings(PersistentLevel("/x", every_n_steps=7)), "levels[0].every_n_steps is"),
        (settings(PersistentLevel("/x"), memory=MemoryLevel(linger_s=5)), "memory.linger_s is 1800.0 and 5"),
        (settings(PersistentLevel("/x"), job_id="other"), "job_id is None and 'other'"),
        (settings(PersistentLevel("/x"), io_timeout_s=5), "io_timeout_s is 60.0 and 5"),
        (settings(PersistentLevel("/x"), redundancy=None), "redundancy is 'auto' and None"),
        (settings(PersistentLevel("/x"), redundancy=Redundancy()), "redundancy is 'auto' and 'Redundancy'"),
    ],
)
def test_what_differs_is_named(others, text):
    mine = settings(PersistentLevel("/x", keep_last=2))

    with pytest.raises(ConfigError) as raised:
        check_alike([mine, mine, others])

    assert "ranks 0 and 2" in str(raised.value)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("mine", "other", "text"),
    [
        (None, Redundancy(), "redundancy is None and 'Redundancy'"),
        (Redundancy(), Redundancy(parity=3), "redundancy.parity is 1 and 3"),
        (Redundancy(), Redundancy(group_size=4), "redundancy.group_size is 8 and 4"),
    ],
)
def test_nodes_protect_each_other_in_one_way(mine, other, text):
    with pytest.raises(ConfigError, match=text):
        check_alike([settings(redundancy=mine), settings(redundancy=other)])


def test_each_node_has_its_network():
    first = Redundancy(max_bytes_per_s=1)
    second = Redundancy(max_bytes_per_s=2)
    check_alike([settings(redundancy=first), settings(redundancy=second)])

    other = dataclasses.replace(second, parity=3)
    with pytest.raises(ConfigError, match="parity is 1 and 3") as raised:
        check_alike([settings(redundancy=first), settings(redundancy=other)])
    assert "max_bytes_per_s" not in str(raised.value)
