"""Nodes, ranks, slots, levels and links in simulated time, around the real ``grants.core.Core`` of each keeper.

Everything is drawn from a seed. What breaks an invariant is counted in ``World.broken``. A name in ``World.without``
leaves a rule out, by what the simulation does around the product's code: so a test can show what the rule is for.
"""

import heapq
import random
from collections import Counter
from typing import NamedTuple

from lazysnap.config import PersistentLevel
from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.coordinator import Coordinator, LevelGrants
from lazysnap.grants.core import Begin, Core, Hold, Learn, Pin, ReleaseStalePins, Send
from lazysnap.grants.messages import Progress, StepKey
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, SlotView
from lazysnap.grants.retention import Retention, still_to_copy

WAITED = "1: a trainer waited for a slot"
LOST_FILE = "2: the newest complete snapshot lost a file"
NOT_COMPLETE = "2: published as complete, but a file is missing"
NOT_COMMON = "5: no common whole step in memory"
NOT_STORED = "5: the newest common step was never stored"
NOT_STORED_ALONE = "5: without the others a node did not store what it holds"
LEFT_BEHIND = "3: files left behind"
KEPT_LOST = "2: files of a kept snapshot are missing"
UNANSWERED = "a required step was never answered"


class World:
    """Time, and files that outlive a start of the job."""

    def __init__(self, seed, num_levels=1, without=()):
        self.random, self.now, self.events, self.count = random.Random(seed), 0.0, [], 0
        self.num_levels, self.without = num_levels, frozenset(without)
        self.files = [set() for _ in range(num_levels)]
        self.published = [{} for _ in range(num_levels)]
        self.broken, self.seen = Counter(), Counter()

    def at(self, delay, call, *args):
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, call, args))

    def run(self, until):
        while self.events and self.events[0][0] <= until:
            self.now, _, call, args = heapq.heappop(self.events)
            call(*args)

    def stall(self):
        """Between two stores of one process."""
        return self.random.choice((1e-5, 1e-5, 1e-5, 0.06 * self.random.random()))

    def delete(self, level, file):
        self.files[level].discard(file)
        self.seen["files in vain"] += file.key not in self.published[level]
        self.broken[LOST_FILE] += bool(self.published[level]) and max(self.published[level]) == file.key

    def publish(self, level, key, num_nodes):
        is_newest = not any(other > key for other in self.published[level])  # an older one may be gone, by right
        files = {NodeFile(key.step, key.start, node, num_nodes) for node in range(num_nodes)}
        self.broken[NOT_COMPLETE] += is_newest and not files <= self.files[level]
        self.published[level].setdefault(key, self.now)


class NodeFile(NamedTuple):
    """A file of one node, by its name."""

    step: int
    start: str
    node: int
    num_nodes: int

    @property
    def key(self):
        return StepKey(self.step, self.start)


class Slot:
    def __init__(self):
        self.step, self.is_whole, self.pin = -1, False, None


class Rank:
    def __init__(self, node, num_slots):
        self.node, self.slots = node, [Slot() for _ in range(num_slots)]
        self.begun, self.step, self.sent, self.is_copied, self.is_gone = -1, 0, 0, True, False

    def view(self):
        slots = tuple(SlotView(slot.step, slot.is_whole, slot.pin) for slot in self.slots if slot.step >= 0)
        return RankView(self.begun, self.is_gone, slots)

    def whole(self):
        return {slot.step for slot in self.slots if slot.is_whole}


class Training:
    """One start: trainers that look at nothing but memory and gradients, and the keepers behind them."""

    def __init__(self, world, start, num_nodes, steps):
        r, self.world, self.start, self.num_nodes = world.random, world, start, num_nodes
        self.first, self.last = steps
        self.began = world.now
        self.every, self.tick = r.choice((1, 1, 2, 5)), r.choice((0.02, 0.2, 1.0))
        self.num_kept, self.down, self.gradients = 2 if self.every == 1 else 1, set(), Counter()
        self.cut, self.out, self.linked, self.due = [0] * num_nodes, [0.0] * num_nodes, set(), {}

    def begin(self, ranks):
        self.ranks = ranks
        self.keepers = [self.new_keeper(node) for node in range(self.num_nodes)]
        for node in range(1, self.num_nodes):
            self.world.at(self.tick * self.world.random.random(), self._link_is_back, node)
        for rank in ranks:
            self._after(0, self._boundary, rank, self.first)

    def _after(self, delay, call, rank, *args):
        self.world.at(delay, lambda: None if rank.is_gone else call(rank, *args))

    def _boundary(self, rank, step):
        rank.step, rank.is_copied = step, step % self.every != 0
        if not rank.is_copied:
            self._choose(rank, step)
        self._after(self.tick * self.world.random.uniform(0.3, 1), self._send_gradient, rank, step + 1)

    def _end(self, rank, slot):
        slot.is_whole = rank.is_copied = True
        self._go_on(rank)

    def _send_gradient(self, rank, step):
        self.gradients[step], rank.sent = self.gradients[step] + 1, step
        if self.gradients[step] == len(self.ranks):
            for other in self.ranks:
                self._go_on(other)

    def _go_on(self, rank):
        """The gate, then the optimizer step."""
        if rank.is_copied and rank.sent == rank.step + 1 and self.gradients[rank.sent] == len(self.ranks):
            rank.sent, rank.is_gone = 0, rank.step >= self.last
            self._after(self.tick * self.world.random.uniform(0, 0.2), self._boundary, rank, rank.step + 1)
            if all(rank.is_gone for rank in self.ranks):
                self.kill()

    # Links and deaths

    def away(self):
        """Nodes that no other one reaches; all, if that is true of the coordinator's."""
        return self.down

    def send(self, sender, target, message):
        """Links keep the order, and lose what is on the way when they break."""
        r, key, node = self.world.random, (sender, target), max(sender, target)
        cut = self.cut[node]
        self.world.seen["messages"] += 1
        delay = r.uniform(1e-4, 0.05) if r.random() < 0.99 else r.uniform(0.05, 2)
        due = self.due[key] = max(self.world.now + delay, self.due.get(key, 0) + 1e-6)
        is_up = lambda: node in self.linked and cut == self.cut[node] and node not in self.away()  # noqa: E731
        if is_up():
            call = lambda: self.keepers[target].received(sender, message) if is_up() else None  # noqa: E731
            self.world.at(due - self.world.now, call)

    def break_link(self, node):
        """Both ends notice it, each at its time, or not before it is back."""
        self.linked.discard(node)
        self.cut[node], lasts = self.cut[node] + 1, self.world.random.uniform(0.01, 5)
        self.out[node] = self.world.now + lasts
        for at, other in ((0, node), (node, 0)):
            self.world.at(lasts * self.world.random.uniform(0, 1.2), self._notice, at, other, self.cut[node])
        self.world.at(lasts, self._link_is_back, node)

    def _notice(self, node, other, cut):
        if cut == self.cut[max(node, other)] and max(node, other) not in self.linked:
            self.keepers[node].link_is_down(other)

    def _link_is_back(self, node):
        if self.world.now >= self.out[node] and node not in self.away():
            self.linked.add(node)
            for at, other in ((0, node), (node, 0)):
                self.keepers[at].link_is_up(other)

    def replace_keeper(self, node):
        """Its trainers start another, which adopts the slots."""
        if all(rank.is_gone for rank in self.ranks if rank.node == node):
            return
        self.keepers[node].is_dead, self.keepers[node] = True, self.new_keeper(node)
        for other in range(1, self.num_nodes) if node == 0 else (node,):
            self.break_link(other)


class Job(Training):
    """With storage."""

    def __init__(self, world, start, num_nodes, steps, faults):
        super().__init__(world, start, num_nodes, steps)
        r, self.faults = world.random, faults
        due = self.every * r.choice((1, 2, 10))
        kept = None if world.num_levels == 1 else 20 * self.every
        self.settings = [PersistentLevel(f"/{i}", every_n_steps=due, keep_last=r.choice((1, 2))) for i in range(1)]
        self.settings += [
            PersistentLevel(f"/{i}", every_n_steps=2 * due, keep_last=r.choice((1, 2)), keep_every_n_steps=kept)
            for i in range(1, world.num_levels)
        ]
        speed, num_ranks = r.choice((0.2, 3, 15)) * self.tick, r.choice((1, 2))
        ranks = [Rank(node, self.num_kept + 2) for node in range(num_nodes) for _ in range(num_ranks)]
        slow = [10 if "slow" in faults and node == num_nodes - 1 else 1 for node in range(num_nodes)]
        self.speed = [speed * r.uniform(1, 2) * factor for factor in slow]
        self.parted = set()
        self.deadline, self.hung, self.common = 8 * max(self.speed), [0.0] * num_nodes, None
        self.begin(ranks)

    def new_keeper(self, node):
        return SimKeeper(self, node)

    def away(self):
        return self.down | (set(range(1, self.num_nodes)) if 0 in self.parted else self.parted)

    def new_coordinator(self):
        levels = [
            LevelGrants(settings, earlier=frozenset(key for key in published if key.start < self.start))
            for settings, published in zip(self.settings, self.world.published, strict=True)
        ]
        kind = Hasty if "all" in self.world.without else Coordinator
        return kind(self.world.random.getrandbits(40), self.start, self.num_nodes, tuple(levels))

    def _choose(self, rank, step):
        kept = sorted(rank.whole())[-self.num_kept :]
        free = [slot for slot in rank.slots if slot.pin is None and not (slot.is_whole and slot.step in kept)]
        if free:
            self._after(self.world.stall(), self._begin, rank, min(free, key=lambda slot: slot.step), step)
        else:
            self.world.broken[WAITED] += 1
            self._after(0.05, self._choose, rank, step)

    def _begin(self, rank, slot, step):
        keeper = self.keepers[rank.node]
        # The step that was begun is stored before the granted step is read.
        slot.step, slot.is_whole, slot.pin, rank.begun = step, False, None, step
        if keeper.word == step:
            self._after(self.world.stall(), self._pin, rank, slot, step)
        self._after(self.tick * self.world.random.uniform(0.05, 1.2), self._end, rank, slot)
        keeper.look()

    def _pin(self, rank, slot, step):
        keeper = self.keepers[rank.node]
        slot.pin = step if "reread" in self.world.without or keeper.word == step else None

    def kill(self):
        """All trainers are gone: the newest step that they have in common must reach every level."""
        self.common = max(set.intersection(*(rank.whole() for rank in self.ranks)), default=None)
        is_begun = min(rank.begun for rank in self.ranks) > self.first + self.every
        self.world.broken[NOT_COMMON] += self.common is None and is_begun
        for rank in self.ranks:
            rank.is_gone = True
        for keeper in self.keepers:
            self.world.at(self.world.random.uniform(0.1, 3), keeper.look)

    def lose_node(self, node):
        """Its memory is gone. The others linger, and store what they hold."""
        self.down.add(node)
        self.world.at(3, self.kill)
        self._part(node)

    def part(self, node):
        """All trainers die. The node keeps its memory, but no other node reaches it any more."""
        self.parted.add(node)
        self.kill()
        self._part(node)

    def _part(self, node):
        """The keepers notice, and look at the time now and then."""
        for other in range(1, self.num_nodes) if node == 0 else (node,):
            self.linked.discard(other)
            self.keepers[0].link_is_down(other)
            self.keepers[other].link_is_down(0)
        for keeper in self.keepers:
            for _ in range(8):
                self.world.at(self.world.random.uniform(20, 200), keeper.look)


class Hasty(Coordinator):
    """Decides before all nodes answered."""

    def decide(self, own):
        num_nodes, self.num_nodes = self.num_nodes, len(self.reports) or 1
        try:
            return super().decide(own)
        finally:
            self.num_nodes = num_nodes


class SimKeeper:
    def __init__(self, job, node):
        self.job, self.world, self.node, self.is_dead, self.word = job, job.world, node, False, None
        self.ranks = [rank for rank in job.ranks if rank.node == node]
        self.required = []
        self.mine = [set() for _ in job.settings]
        levels = tuple(NodeLevel(progress=Progress.LISTING) for _ in self.world.files)
        self.grants = NodeGrants(node, job.start, levels)
        for number in range(len(levels)):
            r, hangs = self.world.random, bool(job.faults & {"keepers", "coordinator"})
            self.world.at(r.uniform(1, 200) * job.tick if hangs and r.random() < 0.3 else 0, self._list, number)
        coordinator = job.new_coordinator() if node == 0 else None
        self.core = Core(self.grants, coordinator, StoringAlone(self.grants, job.num_kept, 20), 0.0)
        self.counted = [(set(), None) for _ in levels]
        self.retention = [Retention(settings, job.start) for settings in job.settings]

    def _file(self, step):
        return NodeFile(step, self.job.start, self.node, self.job.num_nodes)

    def _is_own(self, file):
        return file == self._file(file.step)

    def _is_mine(self, file):
        """Files of earlier starts are shared out."""
        return self._is_own(file) if file.start == self.job.start else file.node % self.job.num_nodes == self.node

    def _list(self, number):
        """The level answers, as late as it likes."""
        if not self.is_dead:
            steps = {file.step for file in self.world.files[number] if self._is_own(file)}
            self.grants.listed(number, steps)
            self.look()

    def views(self):
        return [rank.view() for rank in self.ranks]

    def require(self):
        step = self.ranks[0].begun
        if not self.is_dead and step >= 0:
            self.world.seen["required"] += 1
            self.required.append(step)
            self.grants.require(step, range(len(self.grants.levels)))
            self.look()

    def received(self, node, message):
        if not self.is_dead:
            self.core.received(node, message)
            self.look()

    def link_is_up(self, node):
        if not self.is_dead:
            self.core.link_is_up(node, self.world.now)
            self.look()

    def link_is_down(self, node):
        if not self.is_dead:
            self.core.link_is_down(node, self.world.now)
            self.look()

    def look(self):
        """What ``grant_loop`` does."""
        if not self.is_dead:
            for action in self.core.step(self.views, self.world.now):
                self.count()
                self._do(action)
            self.count()

    def _do(self, action):
        match action:
            case Pin(ranks, step) | Hold(ranks, step):
                for number in ranks:
                    self._pin(self.ranks[number], step)
            case ReleaseStalePins(word):
                self._settle(word)
            case Begin(write):
                self._write(write)
            case Send(node, message):
                self.job.send(self.node, node, message)
            case Learn():
                self.learn()

    def count(self):
        """What the coordinator, if it is here, decided."""
        for number, level in enumerate(self.core.coordinator.levels if self.core.coordinator else ()):
            complete, grant = self.counted[number]
            self.world.seen["grants"] += level.grant not in (None, grant)
            self.counted[number] = set(level.complete), level.grant
            self.publish(number, sorted(level.complete - complete))

    def publish(self, number, steps):
        for step in steps:
            self.world.publish(number, StepKey(step, self.job.start), self.job.num_nodes)

    def learn(self):
        self.retain()

    def _settle(self, word):
        """First the word, then the pins; a trainer does it the other way round."""
        self.word = word
        for slot in (slot for rank in self.ranks for slot in rank.slots if slot.pin != word):
            slot.pin = None

    def _pin(self, rank, step):
        for slot in rank.slots:
            slot.pin = step if slot.step == step else slot.pin

    def _write(self, write):
        r, job = self.world.random, self.job
        took = job.speed[self.node] * r.uniform(0.7, 1.3) * (1 if r.random() < 0.95 else 2) * (1 + 4 * write.level)
        if "hangs" in job.faults and write.level == 0 and r.random() < 0.05:
            job.hung[self.node] = self.world.now + 5 * job.deadline
            if r.random() < 0.5:  # in the commit itself: the file comes although the write was given up
                self.world.at(5 * job.deadline, self.world.files[0].add, self._file(write.step))
        is_broken = write.level == 0 and self.world.now < job.hung[self.node]
        is_broken = is_broken or ("fails" in job.faults and r.random() < 0.1)
        self.world.at(job.deadline if is_broken else took, self._written, write, is_broken)

    def _is_whole(self, write):
        """Whether the slots hold all of the step, as a writer sees it before its commit; ``None``: not any more."""
        step = write.step
        views = self.views()
        slots = [rank.holding(step) for rank in views]
        for rank, slot in zip(views, slots, strict=True):
            if slot is None or (slot.pin != step and not write.is_alone) or (rank.is_gone and not slot.is_whole):
                return None
        return all(slot.is_whole for slot in slots)

    def _written(self, write, is_broken):
        if self.is_dead or self.node in self.job.down:
            return
        if not self.grants.is_wanted(write):
            self.core.missed(write)
            self.look()
            return
        if write.source is None:
            is_whole = self._is_whole(write)
        else:
            is_whole = True if self._file(write.step) in self.world.files[write.source] else None
        if is_broken:
            self.core.failed(write)
            pause = 0 if "probe" in self.world.without else max(self.job.hung[self.node] - self.world.now, 1)
            self.world.at(pause, self._probed, write.level) if pause else self._probed(write.level)
        elif is_whole is False:
            self.world.at(0.02, self._written, write, is_broken)
            return
        elif is_whole is None:
            self.core.missed(write)
        else:
            self.grants.committed(write)
            for files in (self.world.files[write.level], self.mine[write.level]):
                files.add(self._file(write.step))
            self.world.at(self.world.random.uniform(0, 0.1), self._verified, write)
        self.look()

    def _verified(self, write):
        if not self.is_dead:
            self.core.verified(write)
            self.look()

    def _probed(self, level):
        if not self.is_dead:
            self.grants.probed(level)
            self.look()

    def retain(self):
        for number, (retention, level) in enumerate(zip(self.retention, self.grants.levels, strict=True)):
            listing = self.mine[number] & self.world.files[number] if "list" in self.world.without else None
            listing = sorted(self.world.files[number] if listing is None else listing)
            protected = still_to_copy(self.grants.levels, self.job.settings, number, self.job.start)
            for file in listing:
                if not self._is_mine(file) or not retention.is_over(file.key, level, protected):
                    continue
                if "clean" in self.world.without and file.key not in level.complete:
                    kept = sorted(level.complete)[-retention.settings.keep_last :]
                    if file.step not in level.cancelled and not (kept and file.key < kept[0]):
                        continue
                if not self._is_own(file) or self.grants.give_up(number, file.step):
                    self.world.delete(number, file)


FAULTS = ("slow", "fails", "hangs", "keepers", "coordinator", "links")
SCENARIOS = {
    "calm": set(),
    **{fault: {fault} for fault in FAULTS},
    "broken": {"fails", "hangs"},
    "killed": {"killed"},
    "node": {"node"},
    "parted": {"parted"},
    "all": {*FAULTS, "killed"},
}


def play(scenario, seed, *, num_levels=1, without=()):
    """One run from its first step to after the linger time of its keepers; the world, and the job."""
    world, faults = World(f"{scenario}{seed}", num_levels, without), SCENARIOS[scenario]
    r = world.random
    job = last = Job(world, "1", r.choice((2, 3, 5)), (0, r.randrange(60, 150)), faults)
    time = job.last * job.tick
    for _ in range(6):
        node = r.randrange(1, job.num_nodes)
        acts = {
            "keepers": (job.replace_keeper, node),
            "coordinator": (job.replace_keeper, 0),
            "links": (job.break_link, node),
        }
        for name, (call, arg) in acts.items():
            if name in faults and (scenario != "all" or r.random() < 0.4):
                world.at(r.uniform(0, time), call, arg)
        if num_levels > 1:
            world.at(r.uniform(0, time), lambda node: job.keepers[node].require(), node)
    if "killed" in faults:
        world.at(r.uniform(0, time), job.kill)
    if "parted" in faults:
        world.run(r.uniform(0.1, 1) * time)
        job.part(r.randrange(job.num_nodes))
        world.run(world.now + 1000)
        files = [NodeFile(job.common, job.start, node, job.num_nodes) for node in range(job.num_nodes)]
        world.broken[NOT_STORED_ALONE] += job.common is not None and not set(files) <= set().union(*world.files)
        last = Job(world, "2", job.num_nodes, (job.common or 0, job.last + 60), {"fails"})
    if "node" in faults:  # the job starts again on other nodes, maybe while keepers of the first start still write
        world.run(r.uniform(0.1, 1) * time)
        job.lose_node(r.randrange(job.num_nodes))
        world.run(world.now + r.choice((1, 5, 40)))
        first = max((key.step for key in world.published[0]), default=0)
        last = Job(world, "2", r.choice((2, 3, 5)), (first, job.last + 60), {"fails"})
    world.run(1e7)
    for keeper in last.keepers:
        keeper.retain()  # as with a next snapshot
        world.broken[UNANSWERED] += bool(keeper.grants.required)
    for number, settings in enumerate(last.settings):
        _check_files(world, number, settings, {"1": job.num_nodes, last.start: last.num_nodes}, last)
        newest = None if last.common is None else StepKey(last.common, last.start)
        world.broken[NOT_STORED] += newest is not None and newest not in world.published[number]
    return world, job


def _check_files(world, number, settings, num_nodes, last):
    # What keepers of an earlier start complete after the last one listed the level is not counted by that one.
    files, published = world.files[number], world.published[number]
    kept = sorted(key for key, at in published.items() if key.start == last.start or at < last.began)
    kept = kept[-settings.keep_last :]
    every = settings.keep_every_n_steps
    left = [file for file in files if file.key not in kept and (every is None or file.step % every)]
    world.broken[LEFT_BEHIND] += len(left)
    wanted = {
        NodeFile(key.step, key.start, i, num_nodes[key.start]) for key in kept for i in range(num_nodes[key.start])
    }
    world.broken[KEPT_LOST] += len(wanted - files)
