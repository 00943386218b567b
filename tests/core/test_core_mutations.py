"""Each rule that keeps a promise is left out once: the simulated world must notice. So the model can fail."""

from collections.abc import Callable

import pytest
from support.core_world import TIMEOUT_S, Setting, Training, World

from lazysnap.core import node
from lazysnap.core.coordinator import Coordinator
from lazysnap.core.messages import GrantProgress, LevelSettings, RedundancySettings
from lazysnap.core.node import NodeLevel
from lazysnap.core.retention import Retention
from lazysnap.memory.slot_choice import newest_whole

pytestmark = pytest.mark.slow
LEVEL = LevelSettings("level", every_n_steps=1, keep_last=1, timeout_s=TIMEOUT_S)
REDUNDANCY = RedundancySettings(every_n_steps=2, timeout_s=TIMEOUT_S)
NUM_SEEDS = 200


def run(seed: int) -> None:
    """Train on two nodes, with a restart in the middle."""
    world = World(
        Setting(
            seed=seed,
            num_nodes=2,
            levels=(LEVEL,),
            redundancy=REDUNDANCY,
            loss=0.02,
            failure=0.02,
            write_steps=(0.3, 2.0)[seed % 2],
        )
    )
    world.run(6.0)
    world.training.die()
    world.run(1.0)
    world.training = Training(world)
    world.run(6.0)
    world.newest_on_disk()


def is_noticed() -> bool:
    for seed in range(NUM_SEEDS):
        try:
            run(seed)
        except AssertionError:  # the world, or the core itself
            return True
    return False


def one_node_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Coordinator._count_grant

    def count(self, level, grant):
        present = [report for report in level.reports if report.version == level.version]
        if any(report.progress is GrantProgress.STORED for report in present):
            level.become_complete(grant)
        else:
            original(self, level, grant)

    monkeypatch.setattr(Coordinator, "_count_grant", count)


def earlier_grants_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(self, level, grant):
        if all(report.progress is GrantProgress.STORED for report in level.reports):
            level.become_complete(grant)

    monkeypatch.setattr(Coordinator, "_count_grant", count)


def the_newest_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retention, "may_delete", lambda self, key, complete, cancelled: True)


def held_slots_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(views, num_kept, **sizes):
        untouchable = newest_whole(views, num_kept)
        candidates = [view for view in views if view not in untouchable]
        return min(candidates, key=lambda view: (view.is_whole, view.sequence), default=None)

    monkeypatch.setattr("support.core_world.choose_slot", choose)


def parity_lets_its_slots_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeLevel, "key_to_hold", NodeLevel.wanted_key)


def protected_slots_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    original = node.Node.keys_to_hold

    def keys_to_hold(self, required, num_spare):
        self.protected = None
        return original(self, required, num_spare)

    monkeypatch.setattr(node.Node, "keys_to_hold", keys_to_hold)


def test_with_all_rules_no_promise_is_broken():
    assert not is_noticed()


@pytest.mark.parametrize(
    "leave_out",
    [
        one_node_is_enough,
        earlier_grants_count,
        the_newest_may_go,
        held_slots_are_chosen,
        parity_lets_its_slots_go,
        protected_slots_are_not_held,
    ],
)
def test_a_rule_that_is_left_out_breaks_a_promise(leave_out: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    leave_out(monkeypatch)
    assert is_noticed()
