"""Ranks that are configured otherwise than the others are told so, all of them, when the engine is made."""

import pytest

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.engine.alike import check_alike, common_settings
from lazysnap.errors import ConfigError


def settings(*levels, **others):
    return common_settings(SnapshotConfig(levels=levels, **others))


def test_ranks_with_disks_of_their_own_are_alike():
    check_alike([settings(PersistentLevel(f"/disk{rank}", max_bytes_per_s=1000 + rank)) for rank in range(4)])


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (settings(PersistentLevel("/x"), every_n_steps=3), "every_n_steps is 1 and 3"),
        (settings(PersistentLevel("/x"), averaging_period="never"), "averaging_period is None and 'never'"),
        (settings(), "number of levels is 1 and 0"),
        (settings(PersistentLevel("/x", keep_last=9)), "levels[0].keep_last is 2 and 9"),
        (settings(PersistentLevel("/x", every_n_steps=7)), "levels[0].every_n_steps is"),
        (settings(PersistentLevel("/x", aggregate="node")), "levels[0].aggregate is 'rank' and 'node'"),
    ],
)
def test_what_differs_is_named(others, text):
    mine = settings(PersistentLevel("/x", keep_last=2))

    with pytest.raises(ConfigError) as raised:
        check_alike([mine, mine, others])

    assert "ranks 0 and 2" in str(raised.value)
    assert text in str(raised.value)
