"""The core of the keeper in whatever can happen: Hypothesis draws what dies, hangs, fails or is asked for, and when.

The promises are checked by the world itself, at every event. ``settle`` checks that nothing waits for ever: once faults
end, training goes on, its last step becomes complete at every level, and all keepers leave.
"""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec import structs
from support.core_world import PATIENCE_S, TIMEOUT_S, Setting, Training, World

from lazysnap.core.lifecycle import DRAIN_LIMIT_S
from lazysnap.core.messages import Farewell, LevelSettings, NamedStep, RedundancySettings, StepKey

FAULTS = st.sampled_from((0.0, 0.02, 0.1))


def level_settings() -> st.SearchStrategy[LevelSettings]:
    return st.builds(
        LevelSettings,
        url=st.just(""),
        every_s=st.sampled_from((0.5, 5.0)),
        every_n_steps=st.sampled_from((None, 1, 2, 5)),
        keep_last=st.sampled_from((1, 2, 5)),
        keep_every_n_steps=st.sampled_from((None, 7)),
        timeout_s=st.just(TIMEOUT_S),
    )


def redundancy_settings() -> st.SearchStrategy[RedundancySettings | None]:
    present = st.builds(RedundancySettings, every_n_steps=st.sampled_from((1, 3, 10)), timeout_s=st.just(TIMEOUT_S))
    return st.none() | present


class CoreMachine(RuleBasedStateMachine):
    """One job: its nodes, its trainings one after the other, and what befalls them."""

    @initialize(
        seed=st.integers(0, 2**32),
        num_nodes=st.integers(1, 3),
        num_ranks=st.integers(1, 2),
        levels=st.lists(level_settings(), min_size=1, max_size=3).map(tuple),
        redundancy=redundancy_settings(),
        step_s=st.sampled_from((0.1, 1.0)),
        write_steps=st.sampled_from((0.3, 2.0, 10.0)),
        loss=FAULTS,
        failure=FAULTS,
        hang=FAULTS,
    )
    def begin(self, num_nodes, redundancy, levels, **others):
        if num_nodes == 1:
            redundancy = None
        levels = tuple(structs.replace(level, url=f"level {index}") for index, level in enumerate(levels))
        self.setting = Setting(num_nodes=num_nodes, redundancy=redundancy, levels=levels, **others)
        self.world = World(self.setting)
        self.count = 0

    @property
    def training(self) -> Training:
        return self.world.training

    def is_training(self) -> bool:
        return self.training.is_alive and self.training.is_begun

    @rule(steps=st.sampled_from((1, 3, 10)))
    def train(self, steps):
        self.world.run(steps * self.setting.step_s)

    @rule(node=st.integers(0, 2))
    def kill_keeper(self, node):
        self.world.nodes[node % self.setting.num_nodes].kill_keeper()
        self.report()

    @rule(
        node=st.integers(0, 2),
        with_keeper=st.booleans(),
        pause_s=st.sampled_from((0.01, 1.0, 8.0, 45.0)),
        farewell=st.sampled_from((None, Farewell.LEFT, Farewell.OVER)),
        keep_last=st.sampled_from((None, None, 1, 3)),
    )
    def restart_training(self, node, with_keeper, pause_s, farewell, keep_last):
        if farewell is None or not self.training.is_alive:
            self.training.die()
        else:
            self.training.leave(farewell)
        if with_keeper:
            self.world.nodes[node % self.setting.num_nodes].kill_keeper()
        self.world.run(pause_s)
        if keep_last is not None:
            self.change_settings(keep_last)
        self.world.training = Training(self.world)

    def change_settings(self, keep_last):
        """The next start has other settings."""
        levels = tuple(structs.replace(level, keep_last=keep_last) for level in self.setting.levels)
        self.setting = replace(self.setting, levels=levels)
        self.world.setting = self.setting

    @precondition(is_training)
    @rule(ahead=st.integers(0, 2))
    def require(self, ahead):
        self.training.require(self.training.step + ahead)

    @precondition(is_training)
    @rule(ahead=st.integers(0, 2))
    def protect(self, ahead):
        self.training.protect(self.training.step + ahead)

    @precondition(is_training)
    @rule(rank=st.integers(0, 5))
    def preempt(self, rank):
        self.training.preempt(rank)

    @precondition(is_training)
    @rule(ahead=st.integers(0, 2))
    def keep(self, ahead):
        self.count += 1
        self.training.keep(f"name{self.count}", self.training.step + ahead)

    @precondition(is_training)
    @rule(number=st.integers(1, 4))
    def release(self, number):
        self.training.release(f"name{number}")

    @rule(node=st.integers(0, 2), steps=st.sampled_from((1, 5, 20)))
    def part_a_node(self, node, steps):
        self.world.parted = {node % self.setting.num_nodes}
        self.world.run(steps * self.setting.step_s)
        self.world.parted = set()

    @rule()
    def report(self):
        """Trainers notice that a keeper is gone, and start the next one."""
        if self.training.is_alive:
            for rank in self.training.ranks:
                rank.report()

    def teardown(self):
        if hasattr(self, "world"):
            settle(self.world)


def settle(world: World) -> None:
    """No more faults: training goes on, ends, is stored, and all keepers leave."""
    training = world.training
    world.calm()
    world.run_until(lambda: training.is_begun, "training does not begin")
    for rank in training.ranks:
        rank.report()
    world.run_until(partial(is_storing, world, training.step), "nothing is stored while training goes on")
    training.last_step = training.step + 2
    world.run_until(training.is_over, "training does not go on")
    training.end()
    last_key = StepKey(training.start, training.last_step)
    for index, complete in enumerate(world.was_complete):
        world.run_until(partial(complete.__contains__, last_key), f"the last step is not complete at level {index}")
    for named in training.ranks[0].names:
        world.run_until(partial(is_answered, world, named), f"{named} is neither given nor lost")
    training.leave(Farewell.OVER)
    # A thread that never returns has a step that nobody else may write: the keeper leaves at the limit then.
    world.run_until(world.are_keepers_over, "a keeper does not leave", int(DRAIN_LIMIT_S) + PATIENCE_S)
    world.newest_on_disk()


def is_storing(world: World, step: int) -> bool:
    """True if a newer step than this one is complete at the first level."""
    return max(world.was_complete[0], default=StepKey(0, -1)) > StepKey(world.training.start, step)


def is_answered(world: World, named: NamedStep) -> bool:
    keepers = [node.keeper for node in world.nodes if node.keeper is not None]
    is_given = any(named in names for names in world.names)
    return is_given or any(named.key in keeper.core.job.node.order.lost for keeper in keepers)


NUM_PARTS = 20
SETTINGS = settings(
    max_examples=500,
    stateful_step_count=8,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)


def test_anything_may_happen_in_a_few_examples():
    run_state_machine_as_test(seed(0)(CoreMachine), settings=settings(SETTINGS, max_examples=40))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_anything_may_happen(part):
    """Ten thousand examples, the same ones each time. In parts, which several processes share."""
    run_state_machine_as_test(seed(part)(CoreMachine), settings=SETTINGS)


@pytest.mark.parametrize("seed", [101, 449, 583])
def test_storage_is_not_starved_by_slow_redundancy(seed):
    """Redundancy is due at each step and takes ten: memory is full, and storage missed each step it was granted."""
    levels = (
        LevelSettings("level", every_s=0.5, every_n_steps=5, keep_last=2, keep_every_n_steps=7, timeout_s=TIMEOUT_S),
        LevelSettings("level", every_s=5.0, every_n_steps=1, keep_last=1, keep_every_n_steps=7, timeout_s=TIMEOUT_S),
        LevelSettings("level", every_s=5.0, keep_last=2, timeout_s=TIMEOUT_S),
    )
    machine = CoreMachine()
    machine.begin(
        seed=seed,
        num_nodes=2,
        num_ranks=2,
        levels=levels,
        redundancy=RedundancySettings(every_n_steps=1, timeout_s=TIMEOUT_S),
        step_s=1.0,
        write_steps=10.0,
        loss=0.02,
        failure=0.02,
        hang=0.02,
    )
    machine.train(3)
    for ahead in (2, 2, 0):
        machine.protect(ahead)
    machine.teardown()


def test_a_step_whose_write_was_overtaken_is_stored_later():
    """The reason to let go of it was over when the node said so, and the step counted as gone for ever."""
    level = LevelSettings(url="level", every_s=5.0, every_n_steps=1, keep_last=1, keep_every_n_steps=7, timeout_s=5.0)
    slower = LevelSettings(url="level", every_s=0.5, every_n_steps=1, keep_last=2, timeout_s=5.0)
    machine = CoreMachine()
    machine.begin(
        seed=335,
        num_nodes=3,
        num_ranks=1,
        levels=(level, slower),
        redundancy=RedundancySettings(every_n_steps=3, timeout_s=5.0),
        step_s=0.1,
        write_steps=2.0,
        loss=0.0,
        failure=0.0,
        hang=0.02,
    )
    machine.restart_training(farewell=Farewell.LEFT, keep_last=None, node=2, pause_s=0.01, with_keeper=False)
    machine.train(steps=3)
    machine.keep(ahead=0)
    machine.require(ahead=2)
    machine.require(ahead=1)
    machine.protect(ahead=0)
    machine.release(number=1)
    machine.teardown()


def test_a_thread_that_hangs_works_alone_on_its_step_also_after_a_change_of_settings():
    """The next start copied the step once more, and the thread then deleted what it found."""
    fast = LevelSettings(url="level", every_s=0.5, every_n_steps=2, keep_last=1, timeout_s=5.0)
    slow = LevelSettings(url="level", every_s=5.0, every_n_steps=2, keep_last=5, keep_every_n_steps=7, timeout_s=5.0)
    machine = CoreMachine()
    machine.begin(
        seed=215,
        num_nodes=1,
        num_ranks=1,
        levels=(fast, slow, structs.replace(fast, keep_last=2)),
        redundancy=None,
        step_s=1.0,
        write_steps=2.0,
        loss=0.0,
        failure=0.0,
        hang=0.1,
    )
    machine.restart_training(farewell=Farewell.OVER, keep_last=None, node=0, pause_s=8.0, with_keeper=True)
    machine.part_a_node(node=0, steps=20)
    machine.train(steps=3)
    machine.train(steps=10)
    machine.preempt(rank=0)
    machine.restart_training(farewell=None, keep_last=3, node=1, pause_s=8.0, with_keeper=False)
    machine.protect(ahead=2)
    machine.teardown()
