"""Nodes that protect each other's memory, in simulated time: what ``grant_simulation`` is for storage.

Real are the decisions of ``grants`` and ``HeldSteps``, the choice of slots, and what a restart restores. All nodes are
one group. Everything is drawn from a seed, and what breaks an invariant is counted in ``broken``.
"""

import itertools
from collections import Counter, defaultdict
from functools import cache

from lazysnap.config import PersistentLevel
from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.coordinator import Coordinator, LevelGrants
from lazysnap.grants.core import Core
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, SlotView, whole_before_newest
from lazysnap.keeper.held import HeldMember, HeldParity
from lazysnap.keeper.parity import ParitySet, ParityStore
from lazysnap.keeper.protection import HeldSteps
from lazysnap.memory.arena import SlotPhase, SlotStatus
from lazysnap.parity.groups import Group
from lazysnap.parity.pieces import can_rebuild
from lazysnap.ranks.slots import choose_slot
from lazysnap.resolver import Entry, Inventory, candidates
from lazysnap.restore.lost_parts import lost_parts, most_protected
from support.grant_simulation import WAITED, Rank, SimKeeper, Slot, Training, World

LOST = "what was said to be protected cannot be computed"
PASSED_OVER = "a restart did not find what was said to be protected"
TOO_MANY = "more slots are held than there are for it"
OVERSTATED = "told as protected, though a node or its parity is known to be lost"
LET_GO = "what is left of a protected step was let go"
STUCK = "without faults nothing is protected"
NOT_LET_GO = "slots stay held where nothing can be protected"
RUN = "run"


class MemorySlot(Slot):
    """Outlives trainers. ``pin`` is the word ``HOLD``."""

    def __init__(self):
        super().__init__()
        self.start, self.sequence, self.is_taken = "", 0, False

    @property
    def key(self):
        return self.step, self.start

    @property
    def is_kept(self):
        """Whether its capture is there for parity; a trainer that takes a slot puts back what was held meanwhile."""
        return self.pin == self.step >= 0 and (self.is_whole or self.is_taken)

    def status(self):
        phase = SlotPhase.WHOLE if self.is_whole else SlotPhase.CAPTURING if self.step >= 0 else SlotPhase.EMPTY
        return SlotStatus(phase, self.step, self.sequence, 0, 0, None, True, self.pin is not None)

    def drop(self):
        self.step, self.is_whole, self.is_taken = -1, False, False


class MemoryRank(Rank):
    """The trainer of one start."""

    def __init__(self, node, slots, start, begun):
        super().__init__(node, 0)
        self.slots, self.start, self.begun = slots, start, begun

    def view(self):
        slots = [slot for slot in self.slots if slot.step >= 0 and slot.start == self.start]
        views = tuple(SlotView(slot.step, slot.is_whole, hold=slot.pin) for slot in slots)
        return RankView(self.begun, self.is_gone, views)


class Cluster(World):
    """What outlives a start: the nodes' memory, and what was said of it."""

    def __init__(self, seed):
        super().__init__(seed, num_levels=0)
        r = self.random
        self.num_nodes, self.num_ranks = min(r.randint(2, 8), r.randint(2, 8)), r.choice((1, 1, 2))
        self.every, self.tick, self.due = r.choice((1, 1, 2, 5)), r.choice((0.1, 0.5, 2.0)), r.choice((1, 1, 3))
        self.parity, self.num_kept = r.randint(1, min(3, self.num_nodes - 1)), 2 if self.every == 1 else 1
        self.memory, self.stores = [[]] * self.num_nodes, [ParityStore()] * self.num_nodes
        self.committed = [set()] * self.num_nodes
        """By node: snapshots of which it computed its parity since it, or its keeper, was lost last."""
        self.told, self.promised = [None] * self.num_nodes, None
        """By node: what its trainers know to be protected; and the newest that trainers of earlier starts knew."""
        for node in range(self.num_nodes):
            self.lose(node)

    def lose(self, node):
        """Its memory."""
        self.memory[node] = [
            [MemorySlot() for _ in range(self.num_kept + 3)] for _ in range(self.num_ranks)
        ]  # kept, being written, protected, about to be
        self.lose_keeper(node)

    def lose_keeper(self, node):
        """Its parity; trainers notice that at once."""
        self.stores[node], self.committed[node], self.told[node] = ParityStore(), set(), None
        self.check()

    def tell(self, node, key):
        self.told[node] = key
        if key is not None:
            self.promised = None
            self.seen["protected"] += 1
        self.check()

    def holding(self):
        """By snapshot: the nodes that hold their part for parity, and those that hold parity."""
        parts, parities = defaultdict(set), defaultdict(set)
        for node, ranks in enumerate(self.memory):
            for key in set.intersection(*({slot.key for slot in slots if slot.is_kept} for slots in ranks)):
                parts[key].add(node)
            for held in self.stores[node].inventory():
                parities[held.step, held.start].add(node)
        return {key: (frozenset(parts[key]), frozenset(parities[key])) for key in parts}

    def check(self):
        """Whoever is lost next: that snapshot, or a newer one, can be computed.

        A node whose keeper died since counts as lost. What is said is true while no more are lost than parity replaces.
        """
        for key in {self.promised, *self.told} - {None}:
            lost = frozenset(node for node in range(self.num_nodes) if key not in self.committed[node])
            more = self.parity - len(lost)
            if more >= 0 and not self._survives(key, lost, more):
                self.broken[LOST] += 1

    def _survives(self, key, lost, more):
        there = [held for other, held in self.holding().items() if other >= key]
        size = self.num_nodes, self.parity
        if any(not unsurvived(size, lost, more, *held) for held in there):
            return True
        return bool(there) and not frozenset.intersection(*(unsurvived(size, lost, more, *held) for held in there))

    def check_at_rest(self, promised):
        """All that happened is known to all."""
        everybody, holding = frozenset(range(self.num_nodes)), self.holding()
        self.broken[LET_GO] += not any(key >= promised and parts == everybody for key, (parts, _) in holding.items())
        said = [holding.get(key, ((), ())) for key in self.told if key is not None]
        self.broken[OVERSTATED] += any(held != (everybody, everybody) for held in said)

    def restart(self):
        """What a restart of all trainers restores; the rest of what memory holds is dropped."""
        entries = [
            Entry("memory", 0, RUN, slot.start, slot.step, rank, self.num_nodes * self.num_ranks, "", node=str(node))
            for node, ranks in enumerate(self.memory)
            for rank, slots in enumerate(ranks, node * self.num_ranks)
            for slot in slots
            if slot.is_whole
        ]
        held = [(str(node), parity) for node, store in enumerate(self.stores) for parity in store.inventory()]
        _, computed, _ = lost_parts(entries, held)
        plans = candidates([Inventory("memory", tuple(entries)), Inventory("parity", tuple(computed))])
        found = (plans[0].step, plans[0].start) if plans else None
        promised = self.promised
        if promised is not None and sum(promised not in had for had in self.committed) <= self.parity:
            self.broken[PASSED_OVER] += found is None or found < promised
        protected = most_protected(held)
        wanted = {found, protected and (protected.step, protected.start)}
        for slot in (slot for ranks in self.memory for slots in ranks for slot in slots):
            if slot.key not in wanted:
                slot.drop()
        return -1 if found is None else found[0]


@cache
def unsurvived(size, lost, more, parts, parities):
    """The sets of so many more nodes whose loss leaves a snapshot that cannot be computed."""
    num_nodes, parity = size
    group = Group(tuple(range(num_nodes)), parity)
    sets = itertools.combinations(sorted(frozenset(range(num_nodes)) - lost), more)
    return frozenset(also for also in sets if not can_rebuild(group, parts - lost - {*also}, parities - lost - {*also}))


class ProtectedTraining(Training):
    """One start."""

    def __init__(self, cluster, start, step, faults, *, has_room=True):
        super().__init__(cluster, start, cluster.num_nodes, (step + 1, 1 << 40))
        r, self.faults, self.has_room = cluster.random, faults, has_room
        self.every, self.tick, self.num_kept = cluster.every, cluster.tick, cluster.num_kept
        self.speed, self.is_paused = r.choice((0.2, 1, 4)) * self.tick, False
        self.were_whole = set()
        """By node and step: what others may have read, though it is not there any more."""
        ranks = [MemoryRank(node, slots, start, step) for node, of in enumerate(cluster.memory) for slots in of]
        self.begin(ranks)
        for node in range(1, self.num_nodes):
            self.break_link(node)  # they begin one after the other

    def new_keeper(self, node):
        return ProtectingKeeper(self, node)

    def new_coordinator(self):
        level = LevelGrants(PersistentLevel("parity", every_n_steps=self.every * self.world.due), is_memory=True)
        return Coordinator(self.world.random.getrandbits(40), self.start, self.num_nodes, (level,))

    # Captures

    def _boundary(self, rank, step):
        if not self.is_paused:
            super()._boundary(rank, step)

    def _choose(self, rank, step):
        if self.keepers[rank.node].is_dead:
            self.world.seen["left out"] += 1
            rank.is_copied = True
            self._go_on(rank)
            return
        index = choose_slot([slot.status() for slot in rank.slots], [True] * len(rank.slots), self.num_kept)
        if index is None:
            # Which of two steps of an earlier start is protected nobody knows: they stay until this one protects one.
            earlier = {slot.key for slot in rank.slots if slot.pin is not None and slot.start != self.start}
            self.world.broken[WAITED] += len(earlier) < 2
            self._after(0.05, self._choose, rank, step)
        else:
            self._after(self.world.stall(), self._take, rank, rank.slots[index], step)

    def _take(self, rank, slot, step):
        """The stores and looks of ``Slot.take``, and of ``Slot.begin``."""
        slot.is_taken, slot.is_whole = slot.is_whole, False
        self._after(self.world.stall(), self._see, rank, slot, step)

    def _see(self, rank, slot, step):
        if slot.pin is None:
            self._after(self.world.stall(), self._begin, rank, slot, step)
            return
        slot.is_taken, slot.is_whole = False, slot.is_taken
        self.world.seen["put back"] += 1
        self._choose(rank, step)

    def _begin(self, rank, slot, step):
        slot.sequence = 1 + max(slot.sequence for slot in rank.slots)
        slot.step, slot.start, slot.is_taken, rank.begun = step, self.start, False, step
        slow = 6 if "slow" in self.faults and self.world.random.random() < 0.1 else 1
        self._after(self.tick * self.world.random.uniform(0.05, 1.2) * slow, self._end, rank, slot)
        self._poll(rank)

    def _end(self, rank, slot):
        super()._end(rank, slot)
        if all(slot.step in other.whole() for other in self.ranks if other.node == rank.node):
            self.were_whole.add((rank.node, slot.step))
        self._poll(rank)

    def _poll(self, rank):
        self.world.at(self.world.random.uniform(0, self.tick / 5), lambda: self.keepers[rank.node].look())

    # Links and deaths

    def require(self, node):
        self.keepers[node].require()

    def replace_keeper(self, node):
        if not self.keepers[node].is_dead:
            self.keepers[node].is_dead = True
            self.world.lose_keeper(node)
            self.world.at(self.world.random.uniform(0.01, 1), self._succeed, node)

    def _succeed(self, node):
        if not all(rank.is_gone for rank in self.ranks if rank.node == node):
            super().replace_keeper(node)
            self.keepers[node].held.inherit(self.keepers[node].views())

    def kill(self, lost=()):
        """All trainers die, and some nodes. A node without a keeper in this moment loses its memory as well."""
        for rank in self.ranks:
            rank.is_gone = True
            for slot in rank.slots:
                if not slot.is_whole:
                    slot.drop()
        self.world.promised = max(filter(None, (self.world.promised, *self.world.told)), default=None)
        self.world.told = [None] * self.num_nodes
        for keeper in self.keepers:
            if keeper.node in lost or keeper.is_dead:
                keeper.is_dead = True
                self.down.add(keeper.node)
                self.world.lose(keeper.node)
            keeper.look()

    def close(self):
        """Another start begins at the same keepers."""
        for keeper in self.keepers:
            keeper.close()


class ProtectingKeeper(SimKeeper):
    def __init__(self, job, node):
        self.job, self.world, self.node, self.is_dead, self.word, self.required = job, job.world, node, False, None, []
        self.ranks, self.store = [rank for rank in job.ranks if rank.node == node], job.world.stores[node]
        level = NodeLevel(is_memory=True)
        self.grants, self.held = NodeGrants(node, job.start, (level,)), HeldSteps(job.start, level)
        alone, self.away = StoringAlone(self.grants, job.num_kept, 20), set()
        self.core = Core(self.grants, job.new_coordinator() if node == 0 else None, alone, 0.0)
        self.counted = [(set(), None)]

    def received(self, node, message):
        self.away.discard(node)
        super().received(node, message)

    def link_is_down(self, node):
        self.away.add(node)
        super().link_is_down(node)

    def publish(self, number, steps):
        self.world.broken[OVERSTATED] += bool(self.away and steps)

    def learn(self):
        if self.held.learn() and not self.ranks[0].is_gone:
            step = self.held.protected
            self.world.tell(self.node, None if step is None else (step, self.job.start))

    def _settle(self, word):
        held, start, has_let_go = self.held, self.job.start, False
        if held.kept is None and not self.job.has_room:
            held.release_earlier(self.views(), self.job.num_kept)
            if len(whole_before_newest(self.views())) >= self.job.num_kept:
                self.world.promised = None
        for slot in (slot for rank in self.ranks for slot in rank.slots if slot.pin is not None):
            if slot.step < 0 or not held.stays(slot.step, is_own=slot.start == start):
                slot.pin, has_let_go = None, True
        before = self.store.inventory()
        left = self.store.keep(lambda parity: held.stays(parity.step, is_own=parity.start == start))
        held.level.stored = {parity.step for parity in left if parity.start == start}
        for rank in self.ranks:
            own = Counter(slot.start == start for slot in rank.slots if slot.pin is not None)
            self.world.broken[TOO_MANY] += own[True] > 2 or own.total() > 3
        if has_let_go or len(left) < len(before):
            self.world.check()

    def _pin(self, rank, step):
        for slot in rank.slots:
            if slot.key == (step, self.job.start):
                slot.pin = step

    def _write(self, write):
        self.world.at(self.job.speed * self.world.random.uniform(0.7, 1.3), self._encoded, write)

    def _part(self, node, step):
        """Whether all of the node's part could be read; ``None``: it is not there any more, or cannot be reached."""
        job, r = self.job, self.world.random
        if node in job.down or self.world.now < job.out[node] or (job.keepers[node].is_dead and r.random() < 0.5):
            return None
        if node != self.node and (node, step) in job.were_whole and r.random() < 0.5:
            return True
        ranks = [rank for rank in job.ranks if rank.node == node]
        slots = [[slot for slot in rank.slots if slot.key == (step, job.start)] for rank in ranks]
        if node == self.node and not all(slot.pin == step for found in slots for slot in found):
            return None
        if not all(slots):
            return None if any(rank.begun > step for rank in ranks) else False
        return all(slot.is_whole for found in slots for slot in found)

    def _encoded(self, write):
        job, r = self.job, self.world.random
        if self.is_dead or not self.grants.is_wanted(write):
            return
        if not job.has_room or ("fails" in job.faults and r.random() < 0.1):
            self.core.failed(write)
            self.world.at(r.uniform(0.2, 5), self._probed, 0)
            self.look()
            return
        parts = [self._part(node, write.step) for node in range(job.num_nodes)]
        if None in parts:
            self.core.missed(write)
            self.look()
        elif not all(parts):
            self.world.at(job.tick / 5, self._encoded, write)
        else:
            self.store.add(ParitySet(self._parity(write.step), {}))
            self.world.committed[self.node].add((write.step, job.start))
            self.world.at(self.world.stall(), self._verified, write)

    def _parity(self, step):
        world, of = self.world, self.world.num_ranks
        members = [HeldMember([*range(at * of, at * of + of)], 1000, [None] * of) for at in range(world.num_nodes)]
        size = world.num_nodes * of
        return HeldParity(RUN, self.job.start, step, size, members, world.parity, world.parity, 64, self.node)

    def _probed(self, level):
        if self.job.has_room:
            super()._probed(level)

    def close(self):
        if not self.is_dead:
            self.is_dead = True
            self._settle(None)
            self.held.end()
            self._settle(None)


SCENARIOS = {
    "calm": set(),
    "slow": {"slow", "fails"},
    "links": {"links"},
    "keepers": {"keepers"},
    "coordinator": {"coordinator"},
    "crashes": {"crashes"},
    "nodes": {"nodes"},
    "room": {"crashes", "room"},
    "all": {"slow", "fails", "links", "keepers", "coordinator", "crashes", "nodes"},
}


def play(scenario, seed):
    """Up to three starts with faults, and then a time without; the cluster."""
    cluster, faults = Cluster(f"{scenario}{seed}"), SCENARIOS[scenario]
    r, num_starts = cluster.random, 3 if {"crashes", "nodes"} & faults else 1
    training = ProtectedTraining(cluster, "1", -1, faults)
    for number in range(1, num_starts + 1):
        end = cluster.now + r.uniform(2, 60) * cluster.tick * cluster.every
        for _ in range(4):
            node = r.randrange(1, cluster.num_nodes)
            acts = {
                "links": (training.break_link, node),
                "keepers": (training.replace_keeper, node),
                "coordinator": (training.replace_keeper, 0),
            }
            for name, (call, arg) in acts.items():
                if name in faults and (scenario != "all" or r.random() < 0.4):
                    cluster.at(r.uniform(0, end - cluster.now), call, arg)
            cluster.at(r.uniform(0, end - cluster.now), training.require, node)
        cluster.run(end)
        if number == num_starts:
            break
        lost = r.sample(range(cluster.num_nodes), r.choice((1, 1, cluster.parity))) if "nodes" in faults else ()
        training.kill(lost if "crashes" not in faults or r.random() < 0.5 else ())
        cluster.run(cluster.now + r.choice((0.1, 3)))
        step = cluster.restart()
        training.close()
        has_room = "room" not in faults or number < num_starts - 1
        training = ProtectedTraining(cluster, str(number + 1), step, faults, has_room=has_room)
    _play_on(cluster, training)
    return cluster


def _play_on(cluster, training):
    training.faults = set()
    until = cluster.now + 7
    cluster.run(until)
    begun = max(rank.begun for rank in training.ranks)
    for _ in range(300):
        if all(told is not None and told[0] > begun for told in cluster.told):
            _rest(cluster, training)
            return
        until += cluster.tick * cluster.every
        cluster.run(until)
        slots = [slot for rank in training.ranks for slot in rank.slots]
        if not training.has_room and not any(slot.pin is not None and slot.start != training.start for slot in slots):
            return
    cluster.broken[STUCK if training.has_room else NOT_LET_GO] += 1


def _rest(cluster, training):
    """Nothing is captured, and a keeper dies."""
    training.is_paused = True
    cluster.run(cluster.now + 7)
    promised = max(cluster.told)
    training.replace_keeper(cluster.random.randrange(cluster.num_nodes))
    cluster.run(cluster.now + 12)
    cluster.check_at_rest(promised)
