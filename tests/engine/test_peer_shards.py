"""Shards of a lost node, computed from what is left of its group, whatever of that is damaged."""

import threading

import pytest
from support.node_rig import RUN, STARTS, image_of
from support.parity_rig import SLOTS, ParityRig
from support.waiting import TIMEOUT_S, until

from lazysnap import faults
from lazysnap.errors import LazySnapError
from lazysnap.levels.blocks import Wanted
from lazysnap.ranks.discovery import Discovery
from lazysnap.resolver import Entry
from lazysnap.restore.lost_parts import lost_parts
from lazysnap.restore.parity import Parity
from lazysnap.restore.peer_memory import Connections
from lazysnap.snapshots.reader import read

NODES, LOST = range(4), 1


@pytest.fixture
def live():
    """Four nodes, of which two may be lost; a step is protected."""
    made = ParityRig(nodes=len(NODES), parity=2)
    made.begin()
    made.protect()
    until(lambda: granted(made))
    yield made
    made.close()


@pytest.fixture(scope="module")
def rig():
    """The same. Node 0 ends, so nothing newer is protected."""
    made = ParityRig(nodes=len(NODES), parity=2)
    made.begin()
    made.protect()
    until(lambda: granted(made))
    made.stop(0)
    yield made
    made.close()


@pytest.fixture
def step(rig):
    return newest(rig)


def granted(rig):
    """The step that all nodes are to protect next, once none of them computes anything; ``None`` before that."""
    steps = {storage._protection._held.level.grant for storage in rig.storages}
    step = steps.pop()
    return None if steps or step is None or step <= rig.step else step


def newest(rig):
    return max(set.intersection(*({held.step for held in store.inventory()} for store in rig.stores)))


def newest_held(rig, node):
    return max(held.step for held in rig.stores[node].inventory())


def die(rig, *nodes):
    """Keeper and memory are gone."""
    for node in nodes:
        rig.stop(node)
        rig.reads[node].close()


def peers_of(rig, step, lost=(LOST,)):
    """Connections to what is left of a step, the source for its lost parts, and their entries by rank."""
    left = [node for node in NODES if node not in lost]
    held = [(f"n{node}", one) for node in left for one in rig.stores[node].inventory() if one.step == step]
    start = held[0][1].start
    entries = [Entry("memory", 0, RUN, start, step, node, len(NODES), f"0/{step}", node=f"n{node}") for node in left]
    parts, found, *_ = lost_parts(entries, held)
    connections = Connections(Discovery(rig._peers, None, {f"n{node}": rig.addresses[node] for node in left}))
    source = Parity(connections)
    source.lost = parts
    return connections, source, {entry.rank: entry for entry in found}


def computed(rig, step, lost=(LOST,), meanwhile=lambda: None):
    """The shard of the first lost node."""
    connections, source, entries = peers_of(rig, step, lost)
    try:
        shard = source.open(entries[lost[0]], "here")
        out = bytearray(shard.layout.size_bytes)

        def put(at, data):
            out[at : at + len(data)] = data

        meanwhile()  # the first block was computed
        read({shard: [Wanted(shard.offset, shard.offset + len(out), put)]})
        return bytes(out)
    finally:
        connections.close()


def files(rig, node, step):
    """The parity that a node holds."""
    [found] = [one.files for one in rig.stores[node]._sets if one.held.step == step]
    return list(found.values())


def slot_of(rig, node, step):
    [slot] = [slot for slot in rig.nodes[node][0].slots() if slot.status().step == step]
    return slot


@pytest.mark.parametrize("lost", [(1,), (0, 2), (3, 1), (2, 3)])
def test_it_has_the_same_bytes(rig, step, lost):
    assert computed(rig, step, lost) == image_of(step, lost[0])


def test_no_connection_is_left_behind(rig, step):
    connections, source, entries = peers_of(rig, step)
    source.open(entries[LOST], "here")
    sockets = [reader._socket for idle in connections._idle.values() for _, reader in idle]
    assert sockets
    assert not any(one._closed for one in sockets)
    connections.close()
    assert all(one._closed for one in sockets)


@pytest.mark.parametrize(("node", "at"), [(0, 0), (2, 40_000), (3, -1), (0, -9), (2, -30)])
def test_damaged_parity_of_one_node_is_known_and_done_without(rig, step, node, at):
    """Of the parity itself, or of its checksums."""
    for file in files(rig, node, step):
        file[at] ^= 1
    try:
        assert computed(rig, step) == image_of(step, LOST)
    finally:
        for file in files(rig, node, step):
            file[at] ^= 1


@pytest.mark.parametrize("node", [0, 3])
def test_a_damaged_capture_is_known_and_done_without(rig, step, node):
    image = slot_of(rig, node, step).image
    for at in range(5_000, 300_000, 20_000):
        image[at] ^= 1
    try:
        assert computed(rig, step) == image_of(step, LOST)
    finally:
        for at in range(5_000, 300_000, 20_000):
            image[at] ^= 1


@pytest.mark.slow
def test_where_too_much_is_damaged_nothing_is_computed(rig, step):
    """Two nodes are lost, and a third one's capture is not what it was."""
    image = slot_of(rig, 3, step).image
    for at in range(5_000, 300_000, 5_000):
        image[at] ^= 1
    try:
        with pytest.raises(LazySnapError):
            computed(rig, step, (2, 1))
    finally:
        for at in range(5_000, 300_000, 5_000):
            image[at] ^= 1
    assert computed(rig, step, (2, 1)) == image_of(step, 2)


def test_a_node_that_dies_while_it_is_computed_is_done_without(live, caplog):
    live.stop(0)  # nothing newer is protected
    step = newest(live)
    assert computed(live, step, meanwhile=lambda: die(live, 2)) == image_of(step, LOST)
    assert "memory of n2: 127.0.0.1" in caplog.text


def test_more_that_die_meanwhile_than_parity_replaces_are_named(live):
    live.stop(0)
    with pytest.raises(LazySnapError, match=r"not enough of its group is left: .*n2.* cannot be read from"):
        computed(live, newest(live), meanwhile=lambda: die(live, 2, 3))


@pytest.mark.slow
def test_a_node_that_dies_while_parity_is_computed_costs_nothing_that_was_protected(live, caplog):
    live.settings = {"every_n_steps": 1000}
    last = live.step
    live.begin(STARTS[1], follows=True)
    step = newest(live)
    until(lambda: granted(live))
    for _ in range(2 * SLOTS):  # what is not held goes
        live.capture(max(live.step, last) + live.every)

    live.step = granted(live)
    for rank in live.ranks:
        rank.begin(live.step, RUN)  # and until it is whole, its parity is not
    live.look()
    until(lambda: all(live.step in live.held(node) for node in NODES))
    die(live, LOST)

    until(lambda: "is not protected by other nodes, tried again: " in caplog.text)
    assert {live.protected(node) for node in NODES} == {None}
    assert computed(live, step) == image_of(step, LOST)


@pytest.mark.slow
def test_a_node_that_dies_before_all_have_said_that_they_have_their_parity_costs_nothing(live, monkeypatch):
    encoded, goes_on = [], threading.Event()
    original = faults.point

    def point(name):
        if name == "keeper.parity.done":
            encoded.append(name)
            assert goes_on.wait(2 * TIMEOUT_S)
        original(name)

    step = newest(live)
    monkeypatch.setattr(faults, "point", point)
    live.capture(granted(live))
    until(lambda: len(encoded) == len(NODES))
    die(live, LOST)
    goes_on.set()

    left = [node for node in NODES if node != LOST]
    until(lambda: all(newest_held(live, node) > step for node in left))
    assert all((live.protected(node) or 0) <= step for node in left)
    assert computed(live, step) == image_of(step, LOST)
