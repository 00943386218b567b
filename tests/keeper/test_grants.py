"""What the coordinator and the nodes decide: in simulated jobs with faults, and in single decisions."""

import itertools
import pickle
import sys
from collections import Counter

import pytest
from support import grant_simulation as simulation

from lazysnap.config import PersistentLevel
from lazysnap.grants.alone import StoringAlone, to_store_alone
from lazysnap.grants.coordinator import Coordinator, LevelGrants, LocalView
from lazysnap.grants.messages import Progress, StepKey
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, SlotView, Write
from lazysnap.grants.retention import Retention, still_to_copy


def play_many(scenario, seeds, **settings):
    """How many seeds broke each promise, and what was seen in all of them."""
    broken, seen, complete = Counter(), Counter(), 0
    for seed in seeds:
        world, _ = simulation.play(scenario, seed, **settings)
        broken.update(promise for promise, times in world.broken.items() if times)
        seen.update(world.seen)
        complete += sum(len(published) for published in world.published)
    return broken, seen, complete


@pytest.mark.slow
@pytest.mark.parametrize("block", range(7))
@pytest.mark.parametrize("num_levels", [1, 2, 3])
@pytest.mark.parametrize("scenario", simulation.SCENARIOS)
def test_no_fault_breaks_a_promise(scenario, num_levels, block):
    """No trainer waits for storage, nothing complete is lost or invented, nothing is left behind."""
    broken, _, complete = play_many(scenario, range(5 * block, 5 * block + 5), num_levels=num_levels)

    assert broken == {}
    assert complete > 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["calm", "slow"])
def test_nearly_every_granted_step_becomes_complete(scenario):
    _, seen, complete = play_many(scenario, range(12))

    assert complete >= 0.9 * seen["grants"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "scenario", "promise", "seeds"),
    [
        ("all", "coordinator", simulation.NOT_COMPLETE, [0, 2]),
        ("clean", "node", simulation.LEFT_BEHIND, [3, 7]),
        ("list", "node", simulation.LEFT_BEHIND, range(3)),
    ],
)
def test_a_rule_that_is_left_out_breaks_a_promise(rule, scenario, promise, seeds):
    assert play_many(scenario, seeds)[0][promise] == 0
    assert play_many(scenario, seeds, without=[rule])[0][promise] > 0


@pytest.mark.slow
def test_without_a_small_write_that_works_a_hanging_level_is_granted_in_vain():
    with_rule, without = (play_many("hangs", range(12), without=rules)[1] for rules in ([], ["probe"]))

    assert without["files in vain"] > 2 * with_rule["files in vain"]


# Single decisions

START = "s1"


def require(node, step):
    """It must be stored at every level."""
    node.require(step, range(len(node.levels)))


class Cluster:
    """Nodes of one rank, and messages that arrive at once; levels work and slots hold what the test says."""

    def __init__(self, *levels, num_nodes=2, earlier=()):
        """``earlier``: the steps that each level has of the start before."""
        self.settings = levels or (PersistentLevel("/0", every_n_steps=10),)
        had = [frozenset(StepKey(step, "s0") for step in steps) for steps in earlier or [()] * len(self.settings)]
        grants = tuple(LevelGrants(of, earlier=keys) for of, keys in zip(self.settings, had, strict=True))
        self.coordinator = Coordinator(7, START, num_nodes, grants)
        self.nodes = [NodeGrants(node, START, tuple(NodeLevel() for _ in self.settings)) for node in range(num_nodes)]
        self.writes, self.ranks = {}, [RankView(-1, False, ()) for _ in range(num_nodes)]
        self.tell()

    def train(self, begun, *, held_back=1, is_gone=False):
        """All ranks began that step, and hold it and ``held_back`` captures before, every 5 steps."""
        steps = [step for step in range(begun - 5 * held_back, begun + 1, 5) if step >= 0]
        for node in range(len(self.nodes)):
            slots = tuple(SlotView(step, True, self.nodes[node].word) for step in steps)
            self.ranks[node] = RankView(begun, is_gone, slots)
        self.report()

    def report(self):
        for node, rank in zip(self.nodes, self.ranks, strict=True):
            self._look(node)
            self.coordinator.receive(node.report([rank]))
        rank = self.ranks[0]
        if self.coordinator.decide(LocalView(rank.begun, frozenset(slot.step for slot in rank.slots))):
            self.tell()

    def tell(self):
        for node in self.nodes:
            node.receive(self.coordinator.order())
        self.report()

    def _look(self, node):
        for write in node.decide([self.ranks[node.node]]).writes:
            self.writes[node.node, write.level] = write

    def finish(self, level=0, *, nodes=None):
        """The write of each node is committed and read back."""
        for number in range(len(self.nodes)) if nodes is None else nodes:
            write = self.writes.pop((number, level))
            self.nodes[number].committed(write)
            self.nodes[number].verified(write)
        self.report()

    def fail(self, level, node):
        self.nodes[node].failed(self.writes.pop((node, level)))
        self.report()

    def granted(self):
        return [level.grant if level.is_under_way else None for level in self.coordinator.levels]

    def complete(self, level=0):
        return sorted(key.step for key in self.nodes[-1].levels[level].complete)


def test_what_a_node_stores_alone_is_not_counted_for_the_step_that_was_granted():
    cluster = Cluster()
    cluster.train(3)
    cluster.train(10)
    cluster.finish(nodes=[0])
    node = cluster.nodes[1]
    node.missed(cluster.writes.pop((1, 0)))  # and its link is down: nobody hears it
    alone = Write(0, 5, None, node.levels[0].attempt, is_alone=True)

    node.committed(alone)
    node.verified(alone)
    cluster.coordinator.receive(node.report([cluster.ranks[1]]))
    cluster.coordinator.decide(LocalView(10, frozenset()))

    assert cluster.coordinator.levels[0].complete == set()
    assert node.levels[0].stored == {5}


def test_a_cancelled_step_that_is_granted_again_is_not_deleted_and_one_that_is_deleted_is_written_again():
    cluster = Cluster()
    require(cluster.nodes[0], 10)
    cluster.train(3)
    cluster.train(10)
    cluster.finish(nodes=[0])
    cluster.fail(0, node=1)
    first = cluster.nodes[0]
    assert (first.levels[0].grant, 10 in first.levels[0].cancelled, first.levels[0].stored) == (None, True, {10})

    assert first.give_up(0, 10)  # its file is being deleted
    cluster.nodes[1].probed(0)
    cluster.report()

    assert cluster.granted() == [10]
    assert not first.give_up(0, 10)
    assert first.levels[0].progress is Progress.WRITING
    cluster.finish()
    assert cluster.complete() == [10]


def test_a_late_report_on_a_cancelled_grant_does_not_count_when_its_step_is_granted_again():
    """The file that it speaks of may be deleted since."""
    cluster = Cluster()
    require(cluster.nodes[0], 10)
    cluster.train(3)
    cluster.train(10)
    first, second = cluster.nodes
    cluster.finish(nodes=[1])
    late = second.report([cluster.ranks[1]])
    cluster.fail(0, node=0)
    assert second.give_up(0, 10)
    first.probed(0)
    cluster.report()
    assert (cluster.granted(), second.levels[0].progress) == ([10], Progress.WRITING)

    write = cluster.writes.pop((0, 0))
    first.committed(write)
    first.verified(write)
    cluster.coordinator.receive(first.report([cluster.ranks[0]]))
    cluster.coordinator.receive(late)
    cluster.coordinator.decide(LocalView(10, frozenset({10})))
    assert cluster.complete() == [] == sorted(cluster.coordinator.levels[0].complete)

    cluster.finish(nodes=[1])
    assert cluster.complete() == [10]


def test_a_step_is_complete_when_all_nodes_have_reported_it_and_not_before():
    cluster = Cluster()
    cluster.train(3)
    assert cluster.granted() == [10]
    cluster.train(10)

    cluster.finish(nodes=[0])
    assert (cluster.complete(), cluster.granted()) == ([], [10])
    cluster.finish(nodes=[1])

    assert (cluster.complete(), cluster.granted()) == ([10], [20])


def test_a_grant_lies_ahead_of_ranks_that_are_one_step_further():
    cluster = Cluster(PersistentLevel("/0", every_n_steps=1))
    assert cluster.granted() == [2]  # the others may have begun step 1
    cluster.ranks[1] = RankView(4, False, (SlotView(4, True), SlotView(3, True)))
    cluster.report()
    cluster.train(40)
    cluster.report()

    assert cluster.granted()[0] >= 42


def test_one_node_gets_the_newest_step_whenever_its_level_is_idle():
    cluster = Cluster(PersistentLevel("/0", every_n_steps=5), num_nodes=1)
    cluster.train(5)
    stored = []
    for step in range(10, 200, 5):
        cluster.train(step)
        if step % 4 == 0 and cluster.writes:  # a write takes some captures
            cluster.finish()
            stored = cluster.complete()

    assert len(stored) == 9
    assert all(later - earlier <= 25 for earlier, later in itertools.pairwise(stored))


def test_a_missed_step_is_granted_with_a_margin_and_no_clock_cancels():
    cluster = Cluster()
    cluster.train(3)
    cluster.ranks = [RankView(15, False, (SlotView(15, True), SlotView(5, True)))] * 2
    cluster.report()

    assert cluster.coordinator.levels[0].margin == 1
    assert cluster.coordinator.levels[0].cancelled == {10}
    assert cluster.granted() == [20]


def test_a_node_pins_a_step_that_was_begun_before_the_order_came():
    node = NodeGrants(0, START, (NodeLevel(),))
    levels = (LevelGrants(PersistentLevel("/0"), is_open=True, grant=10),)
    coordinator = Coordinator(7, START, 1, levels)
    node.receive(coordinator.order())
    begun = RankView(15, False, (SlotView(10, True), SlotView(15, False)))

    decision = node.decide([begun])

    assert decision.pin == (0,)
    assert [write.step for write in decision.writes] == [10]


def test_a_failed_write_gives_its_pins_back_and_can_never_commit():
    cluster = Cluster()
    cluster.train(10)
    cluster.train(20)
    write = cluster.writes[0, 0]

    cluster.fail(0, node=0)

    assert cluster.nodes[0].word is None
    assert not cluster.nodes[0].is_wanted(write)
    assert cluster.granted() == [None]
    cluster.nodes[0].probed(0)
    cluster.report()
    assert cluster.granted() == [30]


def test_a_file_that_is_read_back_after_its_step_was_cancelled_does_not_count():
    cluster = Cluster()
    cluster.train(10)
    cluster.train(20)
    write = cluster.writes[1, 0]
    cluster.nodes[1].committed(write)
    cluster.fail(0, node=0)

    cluster.nodes[1].verified(write)
    assert cluster.nodes[1].levels[0].stored == set()


def two_levels(**slower):
    return PersistentLevel("/0", every_n_steps=10), PersistentLevel("/1", **{"every_n_steps": 20, **slower})


def test_a_slower_level_that_has_a_snapshot_of_the_start_before_waits_for_its_next_multiple():
    """A restart costs no upload of its own."""
    cluster = Cluster(*two_levels(every_n_steps=100), earlier=([150], [100]))
    cluster.train(155)
    for step in range(160, 210, 10):
        cluster.train(step)
        assert cluster.granted()[1] is None
        cluster.finish(0)

    assert cluster.complete() == [150, 160, 170, 180, 190, 200]
    assert cluster.granted() == [210, 200]


def test_a_slower_level_that_has_nothing_takes_the_first_snapshot():
    cluster = Cluster(*two_levels(every_n_steps=100), earlier=([150], []))
    cluster.train(155)
    cluster.train(160)
    cluster.finish(0)

    assert cluster.granted() == [170, 160]


def test_a_slower_level_copies_the_newest_step_that_is_complete_above():
    cluster = Cluster(*two_levels())
    cluster.train(5)
    for step in (10, 20, 30):
        cluster.train(step)
        cluster.finish(0)

    assert cluster.granted() == [40, 10]
    assert cluster.coordinator.levels[1].source == 0
    cluster.finish(1)
    assert cluster.granted() == [40, 30]
    cluster.finish(1)
    assert cluster.granted() == [40, None]


def calls_of(function):
    """How many calls it makes, also those of generators and of C."""
    calls = itertools.count()
    sys.setprofile(lambda frame, event, arg: next(calls) if event.endswith("call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return next(calls)


@pytest.mark.slow
def test_a_long_training_takes_a_bit_of_memory_for_a_step_and_no_more_work_for_a_decision():
    settings = two_levels(every_n_steps=50, keep_every_n_steps=1000)
    cluster, work, memory = Cluster(*settings), [], []
    for level in (level for node in cluster.nodes for level in node.levels):
        level.remembered = 20

    def train(first, last):
        for step in range(first, last, 10):
            cluster.train(step)
            for index, level in enumerate(settings):
                if (0, index) in cluster.writes:
                    cluster.finish(index)
                delete(index, Retention(level, START))

    def delete(index, retention):
        for node in cluster.nodes:
            level, waiting = node.levels[index], still_to_copy(node.levels, settings, index, START)
            for step in sorted(level.stored):
                if retention.is_over(StepKey(step, START), level, waiting):
                    assert node.give_up(index, step)

    for first, last in ((0, 2000), (3000, 20_000)):
        train(first, last)
        memory.append(len(pickle.dumps((cluster.coordinator, cluster.nodes))))
        work.append(calls_of(lambda last=last: train(last, last + 1000)))

    assert [len(level.complete) for level in cluster.coordinator.levels] == [2099, 420]
    assert work[1] < 1.1 * work[0]
    assert memory[1] - memory[0] < 1.1 * len(settings) * 18_000 / 8


def test_a_disk_of_each_node_copies_nothing_from_a_level_that_all_nodes_see():
    """There is only a share of what each node holds."""
    cluster = Cluster(PersistentLevel("/0", every_n_steps=10, shared=True), PersistentLevel("/1", every_n_steps=10))
    cluster.train(5)
    cluster.train(10)

    assert cluster.granted() == [10, 10]
    assert [level.source for level in cluster.coordinator.levels] == [None, None]


def test_a_slower_level_reads_the_slots_only_while_the_level_above_has_failed():
    cluster = Cluster(*two_levels())
    cluster.train(5)
    cluster.train(10)
    assert cluster.granted() == [10, None]

    cluster.fail(0, node=1)
    assert cluster.granted() == [None, 20]
    assert cluster.coordinator.levels[1].source is None
    cluster.nodes[1].probed(0)
    cluster.report()

    # One step alone is pinned: a level that is back takes the one that the other reads.
    assert cluster.granted() == [20, 20]
    cluster.train(20)
    cluster.finish(0)
    assert cluster.granted() == [None, 20]
    cluster.finish(1)
    assert cluster.granted() == [30, None]
    cluster.train(30)
    cluster.train(40)
    cluster.finish(0)
    assert cluster.coordinator.levels[1].source == 0 or cluster.granted()[1] is None


def test_a_step_that_is_kept_for_ever_is_granted_before_others_and_copied_though_it_is_not_the_newest():
    cluster = Cluster(PersistentLevel("/0", every_n_steps=10), PersistentLevel("/1", keep_every_n_steps=35))
    cluster.train(5)
    cluster.train(10)
    cluster.train(30)
    cluster.finish(0)
    assert cluster.granted() == [35, 10]  # 40 would be due, and the write would go past 35
    cluster.train(35)
    cluster.finish(0)
    cluster.train(40)
    cluster.finish(0)
    cluster.finish(1)

    assert cluster.complete(0) == [10, 35, 40]
    assert cluster.granted()[1] == 35
    protected = still_to_copy(cluster.nodes[0].levels, cluster.settings, 0, START)
    assert protected == {35}


def test_a_faster_level_does_not_wait_with_a_step_that_a_level_between_can_never_have():
    settings = [PersistentLevel(f"/{number}", keep_every_n_steps=None if number == 0 else 10) for number in range(3)]
    fast, between, slow = (NodeLevel(complete={KEY[20], KEY[30]}), NodeLevel(lost=frozenset({20})), NodeLevel())

    assert still_to_copy([fast, between, slow], settings, 0, START) == {30}
    slow.grant = 20  # from the fast one, while the one between had failed
    assert still_to_copy([fast, between, slow], settings, 0, START) == {20, 30}


def test_a_required_step_is_granted_after_the_fact_while_slots_hold_the_step_and_is_lost_after_that():
    cluster = Cluster()
    cluster.train(10)
    cluster.train(20)
    for node in cluster.nodes:
        require(node, 15)
        require(node, 5)
    cluster.finish()

    assert cluster.granted() == [15]
    cluster.finish()
    assert cluster.nodes[0].levels[0].lost == {5}
    assert cluster.complete() == [10, 15]
    require(cluster.nodes[0], 15)
    assert all(node.required == set() for node in cluster.nodes)


def test_a_step_that_one_rank_waits_for_and_a_slower_one_did_not_begin_yet_is_not_lost():
    coordinator = Coordinator(7, START, 1, (LevelGrants(PersistentLevel("/0", every_n_steps=10)),))
    node = NodeGrants(0, START, (NodeLevel(),))
    node.receive(coordinator.order())
    require(node, 5)
    coordinator.receive(node.report([RankView(5, False, (SlotView(5, True),)), RankView(4, False, ())]))
    coordinator.decide(LocalView(5, frozenset(), slowest=4))
    assert (coordinator.levels[0].grant, coordinator.levels[0].lost) == (5, set())

    coordinator.levels[0].grant, coordinator.levels[0].grant_version = None, 0
    coordinator.decide(LocalView(5, frozenset(), slowest=5))
    assert coordinator.levels[0].lost == {5}


def test_a_grant_that_lies_ahead_yields_to_a_step_for_which_training_waits():
    cluster = Cluster(*two_levels())
    cluster.train(5)
    assert cluster.granted()[0] == 10
    for node in cluster.nodes:
        require(node, 5)
    cluster.report()
    cluster.report()

    assert cluster.granted()[0] == 5
    assert cluster.coordinator.levels[0].margin == 0
    cluster.finish(0)
    assert cluster.granted()[1] == 5
    cluster.finish(1)
    assert all(node.required == set() for node in cluster.nodes)
    assert cluster.granted()[0] == 10


def test_when_all_trainers_are_dead_the_newest_common_step_goes_to_every_level():
    cluster = Cluster(*two_levels(every_n_steps=1000))
    cluster.train(5)
    cluster.train(8, is_gone=True)  # the next grant was 10
    cluster.ranks[1] = RankView(13, True, (SlotView(13, True), SlotView(8, True)))
    cluster.report()
    cluster.report()
    assert cluster.granted() == [8, 8]
    cluster.finish(0)
    cluster.finish(1)

    assert (cluster.complete(0), cluster.complete(1), cluster.granted()) == ([8], [8], [None, None])


def test_nothing_is_granted_while_some_nodes_train_and_others_are_dead():
    cluster = Cluster()
    cluster.train(5)
    cluster.ranks[1] = RankView(5, True, (SlotView(5, True),))
    cluster.report()
    assert cluster.nodes[1].levels[0].grant is None  # the step it waited for will not come
    cluster.report()
    assert cluster.granted() == [None]

    cluster.train(6)
    assert cluster.granted() == [10]


def test_what_a_node_is_granted_while_one_of_its_ranks_is_dead_is_missed_once_and_not_again_and_again():
    settings = PersistentLevel("/0")
    coordinator = Coordinator(7, START, 1, (LevelGrants(settings),))
    node = NodeGrants(0, START, (NodeLevel(),))
    alive, dead = RankView(5, False, (SlotView(5, True),)), RankView(5, True, (SlotView(5, True),))
    decisions = 0
    node.receive(coordinator.order())
    for ranks in ([alive, dead], [alive, dead], [dead, dead]):
        node.decide(ranks)
        coordinator.receive(node.report(ranks))
        while decisions < 10 and coordinator.decide(LocalView(5, frozenset({5}))):
            decisions += 1
            node.receive(coordinator.order())
            node.decide(ranks)
            coordinator.receive(node.report(ranks))

    assert decisions < 10
    assert coordinator.levels[0].grant == 5  # what both hold, now that nobody trains
    assert coordinator.levels[0].margin <= 1


def test_without_a_coordinator_a_node_stores_what_all_its_ranks_hold_whole():
    ranks = [
        RankView(30, True, (SlotView(30, True), SlotView(20, True), SlotView(10, True))),
        RankView(30, True, (SlotView(30, False), SlotView(20, True), SlotView(10, True))),
    ]

    assert to_store_alone(ranks, num_kept=2) == [20, 10]
    assert to_store_alone(ranks, num_kept=1) == [20]


def test_a_node_that_is_ahead_of_the_others_stores_the_step_that_they_hold_too():
    """It holds step 30 whole. The others may still copy step 20, so step 10 may be the newest that all hold."""
    ranks = [RankView(30, True, (SlotView(30, True), SlotView(20, True), SlotView(10, True), SlotView(0, True)))]

    assert to_store_alone(ranks, num_kept=2) == [30, 20, 10]


def parted_node(*levels):
    """A node whose trainers are dead and hold steps 30 and 20."""
    node = NodeGrants(1, START, levels or (NodeLevel(), NodeLevel()))
    ranks = [RankView(30, True, (SlotView(30, True), SlotView(20, True), SlotView(10, True)))]
    return node, ranks, StoringAlone(node, num_kept=1, wait_s=20)


def test_a_node_waits_for_the_others_before_it_stores_alone_and_stops_when_they_are_back():
    _, ranks, alone = parted_node()
    assert alone.decide(ranks, 0, is_parted=True) == []
    assert alone.decide(ranks, 19, is_parted=False) == []
    assert alone.decide(ranks, 30, is_parted=True) == []
    assert alone.decide(ranks, 49, is_parted=True) == []

    assert [write.step for write in alone.decide(ranks, 50, is_parted=True)] == [30, 20]

    assert alone.decide(ranks, 90, is_parted=True) == []  # they are being written
    assert not alone.is_over
    living = [RankView(30, False, ranks[0].slots)]
    assert alone.decide(living, 100, is_parted=True) == []


def test_what_a_fast_level_does_not_take_a_node_that_stores_alone_gives_to_the_next():
    node, ranks, alone = parted_node()
    alone.decide(ranks, 0, is_parted=True)
    first, second = alone.decide(ranks, 20, is_parted=True)
    node.verified(first)
    alone.ended(first)
    node.failed(second)
    alone.ended(second)

    writes = alone.decide(ranks, 21, is_parted=True)
    for write in writes:
        node.verified(write)
        alone.ended(write)

    assert [(write.level, write.step) for write in writes] == [(1, 30), (1, 20)]
    assert alone.decide(ranks, 22, is_parted=True) == []
    assert alone.is_over


def test_a_node_stores_nothing_alone_that_is_older_than_a_complete_snapshot():
    node, ranks, alone = parted_node(NodeLevel(complete={StepKey(20, START)}), NodeLevel())
    alone.decide(ranks, 0, is_parted=True)

    [write] = alone.decide(ranks, 20, is_parted=True)

    assert write.step == 30
    node.verified(write)
    alone.ended(write)
    assert alone.decide(ranks, 21, is_parted=True) == []
    assert alone.is_over


def test_a_new_coordinator_takes_up_what_is_under_way_and_counts_what_all_nodes_have():
    cluster = Cluster()
    cluster.train(10)
    cluster.finish()
    cluster.train(20)
    cluster.finish(nodes=[0])
    cluster.coordinator = Coordinator(9, START, 2, (LevelGrants(cluster.settings[0]),))
    cluster.report()
    assert cluster.coordinator.reports == {}, "these answer the coordinator before"

    cluster.tell()

    assert cluster.coordinator.levels[0].complete == {10}
    assert cluster.granted() == [20]
    cluster.finish(nodes=[1])
    assert cluster.complete() == [10, 20]


def test_a_new_coordinator_whose_node_lists_a_level_late_cancels_no_complete_step():
    """Its node may have deleted the snapshot before that one: the file of the other node would be the last."""
    cluster = Cluster()
    cluster.train(10)
    node, other = cluster.nodes
    for number in range(2):
        write = cluster.writes.pop((number, 0))
        cluster.nodes[number].committed(write)
        cluster.nodes[number].verified(write)
    for number in range(2):  # complete now; the keeper dies before the other one hears that
        cluster.coordinator.receive(cluster.nodes[number].report([cluster.ranks[number]]))
    cluster.coordinator.decide(LocalView(10, frozenset()))
    cluster.ranks[:] = [RankView(20, False, (SlotView(20, True),))] * 2  # and memory went on

    cluster.coordinator = Coordinator(9, START, 2, (LevelGrants(cluster.settings[0]),))
    cluster.nodes[0] = node = NodeGrants(0, START, (NodeLevel(progress=Progress.LISTING),))
    cluster.tell()
    cluster.tell()
    assert cluster.coordinator.levels[0].cancelled == set()
    assert not other.levels[0].is_open
    node.listed(0, None)  # it fails
    cluster.report()
    assert cluster.coordinator.levels[0].cancelled == set()
    node.listed(0, {10})
    node.probed(0)
    cluster.report()

    assert cluster.complete() == [10]
    cluster.report()
    assert cluster.granted() == [30]


def test_a_new_keeper_waits_with_a_copy_until_it_knows_what_the_faster_level_has():
    cluster = Cluster(*two_levels())
    cluster.train(5)
    cluster.train(10)
    cluster.finish(0)
    assert cluster.granted()[1] == 10
    del cluster.writes[1, 1]  # the keeper dies over it, and its successor lists the slower level first

    new = NodeGrants(1, START, tuple(NodeLevel(progress=Progress.LISTING) for _ in cluster.settings))
    cluster.nodes[1] = new
    cluster.tell()
    new.listed(1, set())
    cluster.report()
    assert (1, 1) not in cluster.writes
    assert cluster.coordinator.levels[1].lost == set()
    new.listed(0, {10})
    cluster.report()
    cluster.finish(1)

    assert cluster.complete(1) == [10]


def test_a_new_keeper_waits_with_no_copy_for_a_faster_level_that_does_not_answer():
    cluster = Cluster(*two_levels())
    cluster.train(5)
    cluster.train(10)
    cluster.finish(0)
    new = NodeGrants(1, START, tuple(NodeLevel(progress=Progress.LISTING) for _ in cluster.settings))
    cluster.nodes[1] = new
    cluster.tell()
    new.listed(1, set())
    new.listed(0, None)
    cluster.report()

    assert cluster.granted()[1] is None


# Retention

KEY = [StepKey(step, START) for step in range(100)]


def expired(steps, *, complete, keep_last=2, protected=(), start=START, **level):
    retention = Retention(PersistentLevel("/0", keep_last=keep_last, keep_every_n_steps=50), "s1")
    state = NodeLevel(is_open=True, complete={KEY[step] for step in complete}, **level)
    return [step for step in steps if retention.is_over(StepKey(step, start), state, protected)]


def test_complete_steps_go_when_enough_newer_ones_are_complete_and_incomplete_ones_when_one_is():
    assert expired([10, 20, 30, 31], complete=[10, 20]) == []
    assert expired([10, 20, 25, 30, 31], complete=[10, 20, 30]) == [10, 25]
    assert expired([10, 20], complete=[]) == []
    assert expired([10, 20, 30], complete=[10, 20, 30], protected=[10]) == []
    assert expired([50, 60, 70, 80], complete=[50, 60, 70, 80]) == [60]


@pytest.mark.slow
@pytest.mark.parametrize("keep_last", [200, 300, 1500, 10**9])
def test_so_many_complete_ones_stay_however_many_these_are(keep_last):
    """The coordinator tells the newest alone; a keeper that comes later knows no others."""
    retention = Retention(PersistentLevel("/0", keep_last=keep_last), START)
    grants = LevelGrants(retention.settings)
    earlier = {StepKey(7, "s0")}  # that a restart saw
    first, later = (NodeLevel(is_open=True, complete=set(earlier), remembered=max(1024, keep_last)) for _ in range(2))
    every = [StepKey(step, START) for step in range(4000)]

    def oldest_to_stay(level, step):
        return next(number for number in range(step + 1) if not retention.is_over(every[number], level))

    for step in range(4000):
        grants.complete.add(step)
        if step % 100 == 99:
            order = grants.order(START, (), is_ready=True)
            first.learn(order)
            if step > 2000:
                later.learn(order)
    for level in (first, later):
        assert oldest_to_stay(level, 3999) <= max(0, 4000 - keep_last)
    if keep_last <= 300:
        assert oldest_to_stay(first, 3999) == 4000 - keep_last


def test_a_cancelled_step_goes_unless_it_is_granted_again():
    assert expired([10, 20], complete=[10], cancelled=frozenset({20})) == [20]
    assert expired([10, 20], complete=[10], cancelled=frozenset({20}), grant=20) == []
    assert expired([10], complete=[10], cancelled=frozenset({10})) == []


def test_snapshots_of_earlier_starts_go_as_those_of_this_one():
    assert expired([10, 20], complete=[30], start="s0") == [10, 20]
