"""A keeper looks at the slots less and less often while no step begins, and again a few times per step afterwards."""

import contextlib
import time

import pytest
from support.waiting import until

from lazysnap.config import PersistentLevel
from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.coordinator import Coordinator, LevelGrants
from lazysnap.grants.core import Core
from lazysnap.grants.messages import Progress
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView
from lazysnap.keeper.grant_loop import GrantLoop

RARE_S, OFTEN_S = 0.15, 0.1


@pytest.mark.slow
def test_a_training_that_rests_costs_its_keeper_few_looks_at_the_slots():
    begun, looks = 3, []

    def look():
        looks.append(time.monotonic())
        return [RankView(begun, False, ())]

    def gap_s():
        return looks[-1] - looks[-2] if len(looks) > 1 else 0.0

    def is_looked_at_often():
        nonlocal begun
        begun += 1
        return gap_s() < OFTEN_S

    node = NodeGrants(0, "s1", (NodeLevel(progress=Progress.LISTING),))
    coordinator = Coordinator(1, "s1", 1, (LevelGrants(PersistentLevel("level", every_n_steps=1000)),))
    core = Core(node, coordinator, StoringAlone(node, 1, 0.5), time.monotonic())
    with contextlib.closing(GrantLoop(core, look, lambda action: None)) as loop:
        loop.start(None)
        loop.post(node.listed, 0, set())
        until(lambda: node.word == 1000)

        until(lambda: gap_s() > RARE_S)
        until(is_looked_at_often)
