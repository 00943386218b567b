"""What keepers protect for each other, over real sockets and slots, and what a restart computes from it."""

import contextlib
import itertools
import logging
import threading
from types import SimpleNamespace

import pytest
from support.parity_group import LEVEL, RUN, START, Control, ParityGroup, image_of
from support.peer_ends import settings_of
from support.waiting import until

from lazysnap import faults
from lazysnap.core.actions import DeleteFiles, Failed, Listed, ListLevel, Missed, ProbeLevel, StepStored, TaskEnded
from lazysnap.core.messages import StepKey
from lazysnap.errors import LazySnapError
from lazysnap.keeper.parity import ParityStore
from lazysnap.levels.blocks import WantedBytes
from lazysnap.levels.watched import RateLimiter
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.parity.groups import Group, Pieces
from lazysnap.peers.secret import draw_secret
from lazysnap.resolver import Entry
from lazysnap.restore.lost_parts import lost_parts
from lazysnap.restore.parity import Parity
from lazysnap.restore.peer_memory import PeerMemory
from lazysnap.snapshots.reader import read

STEP = 4
TEXT = f"{START:016x}"


@pytest.fixture
def make_group():
    with contextlib.ExitStack() as stack:

        def make(nodes=3, **settings):
            group = ParityGroup(nodes, **settings)
            stack.callback(group.close)
            return group

        yield make


@pytest.fixture
def group(make_group):
    return make_group()


class Restart:
    """A restart that finds what is left of a group."""

    def __init__(self, group, step, lost):
        left = [node for node in group.nodes if node.number not in lost]
        held = [(f"n{node.number}", parity) for node in left for parity in node.store.inventory()]
        entries = []
        for node in left:
            for local_rank, captures in enumerate(node.ranks):
                location = (local_rank, captures.place(step)[1])
                where = f"n{node.number}"
                entries.append(
                    Entry("memory", RUN, TEXT, step, captures.rank, captures.world_size, location, node=where)
                )
        addresses = {}
        for node, address in enumerate(group.peers.addresses):
            addresses[f"n{node}"] = (address.host, address.port)
        for node in lost:
            del addresses[f"n{node}"]
        self.peers = PeerMemory(SimpleNamespace(secret=group.secret, reads=addresses))
        self.memory = {entry.rank: entry for entry in entries}
        self.source = Parity(self.peers)
        self.source.lost, found, self.problems = lost_parts(entries, held)
        self.parity = {entry.rank: entry for entry in found}

    def compute(self, rank, meanwhile=lambda: None):
        """Return the shard of a rank, computed from parity. ``meanwhile`` is called behind the first block."""
        return self._read(self.source.open(self.parity[rank], "here"), meanwhile)

    def read(self, rank):
        """Return the shard of a rank, out of the memory of its node."""
        return self._read(self.peers.open(self.memory[rank], "there"), lambda: None)

    def _read(self, shard, meanwhile):
        out = bytearray(shard.layout.size_bytes)

        def put(at, data):
            out[at : at + len(data)] = data

        meanwhile()
        read({shard: [WantedBytes(shard.offset, shard.offset + len(out), put)]})
        return bytes(out)


@pytest.fixture
def restart():
    with contextlib.ExitStack() as stack:

        def make(group, *lost, step=STEP):
            made = Restart(group, step, lost)
            stack.callback(made.peers.close)
            return made

        yield make


def outcomes(ended):
    return [type(event) for event in ended]


# --- memory ---


def anonymous_bytes():
    """Private memory of this process that is in place."""
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_memory_for_parity_is_in_place_before_it_is_no_longer_reserved():
    """Else slots that are made meanwhile would be promised the same memory."""
    size_bytes = 40 << 20
    before = anonymous_bytes()

    buffers = ParityStore().buffers(2, size_bytes, lambda: None)

    assert anonymous_bytes() - before >= 2 * size_bytes
    assert all(len(buffer) == size_bytes and not any(buffer[:4096]) for buffer in buffers)


def test_a_task_that_is_cancelled_takes_no_more_memory_for_parity():
    size_bytes = 256 << 20
    before = anonymous_bytes()

    def beat():
        raise CaptureAborted("cancelled")

    with pytest.raises(CaptureAborted):
        ParityStore().buffers(2, size_bytes, beat)

    assert anonymous_bytes() - before < size_bytes


# --- protected ---


@pytest.mark.parametrize(
    ("nodes", "parity", "lost"), [(2, 1, (1,)), (3, 1, (0,)), (3, 1, (2,)), (4, 2, (0, 2)), (4, 2, (3, 1))]
)
def test_a_lost_part_is_computed_from_what_is_left(make_group, restart, nodes, parity, lost):
    group = make_group(nodes, parity=parity)
    group.protect(STEP)
    for node in lost:
        group.nodes[node].die()
    found = restart(group, *lost)
    for node in lost:
        assert found.compute(node) == image_of(STEP, node)


def test_all_ranks_of_a_lost_node_are_computed_and_those_of_others_are_read(make_group, restart):
    group = make_group(3, ranks=2)
    group.protect(STEP)
    group.nodes[1].die()
    found = restart(group, 1)
    for rank in (2, 3):
        assert found.compute(rank) == image_of(STEP, rank)
    for rank in (0, 1, 4, 5):
        assert found.read(rank) == image_of(STEP, rank)


def test_what_is_stored_says_what_it_is_of(make_group):
    group = make_group(3, ranks=2)
    ended = group.protect(STEP)
    for node, event in zip(group.nodes, ended, strict=True):
        [held] = node.store.inventory()
        assert (held.run_id, held.start, held.step, held.world_size) == (RUN, TEXT, STEP, 6)
        assert [member.ranks for member in held.members] == [[0, 1], [2, 3], [4, 5]]
        assert (held.parity, held.most_lost, held.position) == (1, 1, node.number)
        assert event.written_bytes == node.store.size_bytes > 0
        assert event.number == 1


def test_parity_is_listed_deleted_and_its_memory_used_again(group):
    group.protect(STEP)
    group.protect(STEP + 1)
    node = group.nodes[0]
    keys = (StepKey(START, STEP + 1), StepKey(START, STEP))
    assert node.run(ListLevel(LEVEL, 7)) == Listed(7, keys)
    size_bytes = node.store.size_bytes
    assert node.run(DeleteFiles(LEVEL, 8, keys[1:])) == TaskEnded(8)
    assert node.run(ListLevel(LEVEL, 9)) == Listed(9, keys[:1])
    assert node.store.size_bytes == size_bytes, "it waits for the next parity"
    group.protect(STEP + 2)
    assert node.store.size_bytes == size_bytes


def test_memory_that_is_used_again_gives_the_same_parity(group, restart):
    group.protect(STEP - 1)
    for node in group.nodes:
        node.store.delete(node.store.keys())
    group.protect(STEP)
    group.nodes[2].die()
    assert restart(group, 2).compute(2) == image_of(STEP, 2)


def test_captures_are_read_while_they_fill(group, restart):
    """The last one is whole long after all was read of the others."""
    slots = []
    for node in group.nodes:
        [captures] = node.ranks
        slots.append((captures, captures.fill(captures.begin(STEP), 0.3)))

    def fill(number):
        captures, slot = slots[number]
        captures.fill(slot).commit(copied_ns=1)

    control = Control()
    ended = []
    tasks = [node.write(STEP) for node in group.nodes]
    running = threading.Thread(target=lambda: ended.extend(group.run_all(tasks, [control, Control(), Control()])))
    running.start()
    fill(2)
    fill(1)
    until(lambda: control.num_beats > 20)
    assert not ended
    assert not any(node.store.keys() for node in group.nodes)
    fill(0)
    running.join()
    assert outcomes(ended) == [StepStored] * 3
    group.nodes[0].die()
    assert restart(group, 0).compute(0) == image_of(STEP, 0)


def test_a_node_may_be_a_little_ahead_of_the_ranks_of_another_one(group):
    for node in group.nodes[:2]:
        node.capture(STEP)
    ended = []
    running = threading.Thread(target=lambda: ended.append(group.nodes[0].run(group.nodes[0].write(STEP))))
    running.start()
    running.join(0.2)
    assert not ended
    group.nodes[2].capture(STEP)
    running.join()
    assert outcomes(ended) == [StepStored]


def test_all_that_is_read_of_others_waits_for_the_rate_that_parity_is_given(group):
    class Counting(RateLimiter):
        def wait_for(self, num_bytes, while_waiting):
            taken.append(num_bytes)
            super().wait_for(num_bytes, while_waiting)

    taken = []
    group.nodes[0].context.pace = Counting(None)
    group.protect(STEP)
    [held] = group.nodes[0].store.inventory()
    sizes = tuple(member.size_bytes for member in held.members)
    assert sum(taken) == 2 * Pieces(Group((0, 1, 2), 1), sizes, held.block_bytes).piece_bytes
    assert sum(sizes) / 3 <= sum(taken) < sum(sizes) / 2


def test_what_was_moved_is_counted_for_people(group):
    group.capture(STEP)
    controls = [Control() for _ in group.nodes]
    group.run_all([node.write(STEP) for node in group.nodes], controls)
    parts = sum(member.size_bytes for member in group.nodes[0].store.inventory()[0].members)
    assert sum(control.moved_bytes for control in controls) == parts


# --- not protected ---


def test_a_step_that_another_node_does_not_have_any_more_is_missed(group, caplog):
    caplog.set_level(logging.INFO)
    group.capture(STEP)
    tasks = [node.write(STEP) for node in group.nodes]
    for later in (5, 6, 7):
        group.nodes[2].capture(later)
    ended = group.run_all(tasks)
    assert outcomes(ended) == [Missed] * 3
    assert "node 2: 127.0.0.1" in ended[0].text
    assert "step 4 is not in memory any more" in ended[0].text
    assert f"step {STEP} is not protected by other nodes: node 2" in caplog.text
    assert not any(record.levelno > logging.INFO for record in caplog.records)


def test_a_capture_that_is_torn_while_others_read_it_is_missed(group):
    slots = []
    for node in group.nodes:
        [captures] = node.ranks
        slots.append(captures.fill(captures.begin(STEP), 0.9))
    for slot in slots[:2]:
        slot.advance(slot.view().image_bytes)
        slot.commit(copied_ns=1)

    def tear():
        if control.num_beats == 12:
            slots[2].discard(1)

    control = Control(tear)
    ended = group.nodes[0].run(group.nodes[0].write(STEP), control)
    assert isinstance(ended, Missed)
    assert "node 2" in ended.text
    assert group.nodes[0].store.keys() == ()


def test_a_job_that_is_cancelled_is_missed_and_holds_nothing(group):
    group.nodes[0].capture(STEP)  # the others do not

    def cancel():
        control.is_cancelled = control.num_beats >= 3

    control = Control(cancel)
    ended = group.nodes[0].run(group.nodes[0].write(STEP), control)
    assert ended == Missed(1, "the task was cancelled")
    assert group.nodes[0].store.keys() == ()


def test_a_node_that_is_dead_is_named_once_and_probed(group, caplog):
    caplog.set_level(logging.INFO)
    group.capture(STEP)
    group.nodes[1].die()
    job = group.nodes[0].write(STEP)
    for _ in range(3):
        ended = group.nodes[0].run(job)
        assert isinstance(ended, Failed)
        assert f"node 1: 127.0.0.1:{group.peers.addresses[1].port} cannot be read from" in ended.text
    texts = [record for record in caplog.records if "not protected by other nodes, tried again" in record.getMessage()]
    assert [record.levelno for record in texts] == [logging.WARNING, logging.INFO, logging.INFO]

    assert isinstance(group.nodes[0].run(ProbeLevel(LEVEL, 2)), Failed)
    group.nodes[1].come_back(group.peers)
    assert group.nodes[0].run(ProbeLevel(LEVEL, 3)) == TaskEnded(3)
    assert isinstance(group.nodes[0].run(job), StepStored)
    group.nodes[1].die()
    group.nodes[0].run(job)
    assert caplog.records[-1].levelno == logging.WARNING, "it worked meanwhile"


def test_a_node_that_dies_while_parity_is_computed_costs_nothing_that_was_protected(group, restart):
    group.protect(STEP)
    for node in group.nodes:
        [captures] = node.ranks
        captures.fill(captures.begin(STEP + 1), 0.5)

    def die():
        if control.num_beats == 10:
            group.nodes[1].die()

    control = Control(die)
    tasks = [node.write(STEP + 1, 2) for node in group.nodes]
    ended = [group.nodes[number].run(tasks[number], control if number == 0 else None) for number in (0, 2)]
    assert all(isinstance(event, (Failed, Missed)) for event in ended), ended
    assert all("node 1" in event.text for event in ended)
    assert restart(group, 1).compute(1) == image_of(STEP, 1)


def test_a_peer_that_stands_still_does_not_delay_the_report_of_another_one(group):
    group.nodes[0].capture(STEP)
    group.nodes[1].capture(STEP)
    group.nodes[2].ranks[0].begin(STEP)  # it stands still: nothing is copied
    task = group.nodes[0].write(STEP)
    beats = itertools.count(1)

    def refuse():
        if next(beats) == 1:  # on one of two threads: each number comes once
            for later in (5, 6, 7):
                group.nodes[1].capture(later)

    ended = group.nodes[0].run(task, Control(refuse))
    assert isinstance(ended, Missed), ended


def test_another_start_is_not_read(group):
    group.capture(STEP)
    strangers = settings_of(draw_secret(), [address.port for address in group.peers.addresses])
    group.nodes[0].context.peers = strangers
    ended = group.nodes[0].run(group.nodes[0].write(STEP))
    assert isinstance(ended, Failed)
    assert "cannot be read from" in ended.text


def test_a_step_without_memory_for_its_parity_fails(group, monkeypatch):
    group.capture(STEP)

    def refuse(count, size_bytes, beat):
        raise MemoryError

    monkeypatch.setattr(group.nodes[0].store, "buffers", refuse)
    ended = group.run_all([node.write(STEP) for node in group.nodes])
    assert outcomes(ended) == [Failed, StepStored, StepStored]
    assert ended[0].text == "MemoryError: "


def test_a_capture_that_came_again_while_it_was_read_is_missed(group):
    """After a rollback the same step is captured again: no parity is of two captures."""
    slots = []
    for node in group.nodes:
        [captures] = node.ranks
        slots.append((captures, captures.fill(captures.begin(STEP), 0.5)))

    def replace():
        if control.num_beats == 12:
            captures, slot = slots[2]
            slot.discard(1)
            captures.capture(STEP)

    control = Control(replace)
    ended = group.nodes[0].run(group.nodes[0].write(STEP), control)
    assert isinstance(ended, Missed)


# --- damage ---


def damage(node, at):
    """Flip a byte of all parity of a node."""
    for parity in node.store._sets:
        for file in parity.files.values():
            file[at] ^= 1


@pytest.fixture
def damaged_group(make_group):
    group = make_group(4, parity=2)
    group.protect(STEP)
    return group


@pytest.mark.parametrize(("node", "at"), [(0, 0), (2, 40_000), (3, -1), (0, -9), (2, -30)])
def test_damaged_parity_of_one_node_is_known_and_done_without(damaged_group, restart, node, at):
    """Of the parity itself, or of its checksums."""
    damage(damaged_group.nodes[node], at)
    damaged_group.nodes[1].die()
    assert restart(damaged_group, 1).compute(1) == image_of(STEP, 1)


def flip_captures(node):
    for slot in node.ranks[0].trainer:
        for at in range(5_000, 300_000, 5_000):
            slot.image[at] ^= 1


def test_a_damaged_capture_is_known_and_done_without(damaged_group, restart):
    flip_captures(damaged_group.nodes[3])
    damaged_group.nodes[1].die()
    assert restart(damaged_group, 1).compute(1) == image_of(STEP, 1)


def test_where_too_much_is_damaged_nothing_is_computed(damaged_group, restart):
    flip_captures(damaged_group.nodes[3])
    for node in (1, 2):
        damaged_group.nodes[node].die()
    with pytest.raises(LazySnapError):
        restart(damaged_group, 1, 2).compute(2)
    flip_captures(damaged_group.nodes[3])
    assert restart(damaged_group, 1, 2).compute(2) == image_of(STEP, 2)


def test_a_node_that_dies_while_a_part_is_computed_is_done_without(damaged_group, restart, caplog):
    damaged_group.nodes[1].die()
    assert restart(damaged_group, 1).compute(1, damaged_group.nodes[2].die) == image_of(STEP, 1)
    assert "memory of n2: 127.0.0.1" in caplog.text


def test_more_that_die_meanwhile_than_parity_replaces_are_named(damaged_group, restart):
    damaged_group.nodes[1].die()

    def die():
        damaged_group.nodes[2].die()
        damaged_group.nodes[3].die()

    with pytest.raises(LazySnapError, match=r"not enough of its group is left: .*n2.* cannot be read from"):
        restart(damaged_group, 1).compute(1, die)


def test_no_connection_is_left_behind(damaged_group, restart):
    damaged_group.nodes[1].die()
    found = restart(damaged_group, 1)
    found.compute(1)
    readers = [reader for idle in found.peers._idle.values() for reader in idle]
    assert readers
    assert all(reader._connection is not None for reader in readers)
    found.peers.close()
    assert all(reader._connection is None for reader in readers)


def test_fault_points_are_passed(group, monkeypatch):
    passed = []
    monkeypatch.setattr(faults, "point", passed.append)
    group.protect(STEP)
    names = [name for name in passed if name.startswith("keeper.parity")]
    assert sorted(names) == ["keeper.parity.begin"] * 3 + ["keeper.parity.done"] * 3


def test_an_empty_store_has_nothing():
    store = ParityStore()
    assert (store.keys(), store.inventory(), store.size_bytes, store.find(TEXT, 1)) == ((), [], 0, None)
