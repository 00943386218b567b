"""Keepers of one node that were told other things of a level, as a start before this one may have left them."""

import contextlib
import dataclasses

import pytest
from keeper_jobs import until
from node_jobs import Here, Member


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (1, "rank 1 of this node: it has no such level"),
        (0, "rank 0, which writes for this node, was not heard of for 1 s"),
    ],
)
def test_a_keeper_that_writes_files_of_its_own_is_named_by_the_one_that_waits_for_it(tmp_path, other, text):
    member = Member(tmp_path, rank=other, aggregate="rank", timeout_s=1.0)
    with contextlib.closing(member.start()):
        member.level = dataclasses.replace(member.level, aggregate="node")
        with contextlib.closing(Here(member, 1 - other)) as here:
            here.adopt(5, pin=True)

            assert until(lambda: here.told("level_failed") == [5])
            assert any(text in event.get("text", "") for event in here.events)
