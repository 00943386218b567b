"""What keepers protect for each other, what they hold meanwhile, and what they say of it."""

import contextlib
import logging
import re
import threading

import msgspec
import pytest
from support.node_rig import RUN, STARTS
from support.parity_rig import ParityRig
from support.waiting import TIMEOUT_S, until

from lazysnap import SnapshotConfig
from lazysnap.config import PersistentLevel
from lazysnap.errors import KeeperError
from lazysnap.events import Alert, Protected
from lazysnap.grants.coordinator import Coordinator, LevelGrants, LocalView
from lazysnap.grants.messages import LevelOrder, LevelReport, Order, Progress, Report, StepKey
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, SlotView
from lazysnap.keeper import protection, reminder
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.events import KeeperEvent
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.node_slots import NodeSlots
from lazysnap.keeper.parity import Encoding, ParityStore
from lazysnap.keeper.protocol import Run, Status
from lazysnap.levels.watched import RateLimiter
from lazysnap.links import client as peer_client
from lazysnap.links.client import PeerReader
from lazysnap.links.messages import PartOf, PeerRefused
from lazysnap.links.server import Deadlines, PeerServer
from lazysnap.memory.arena import SlotPhase
from lazysnap.memory.failures import CaptureAborted
from lazysnap.parity.groups import Group
from lazysnap.parity.pieces import Pieces
from lazysnap.topology import Team

pytestmark = pytest.mark.slow

NODES = range(3)


@pytest.fixture
def rig():
    made = ParityRig(nodes=len(NODES))
    yield made
    made.close()


def run_of(rig, node=0):
    return rig.storages[node].run


def is_encoding():
    return any(thread.name.startswith("lazysnap-parity") for thread in threading.enumerate())


def test_the_slots_and_the_parity_of_a_protected_step_stay_until_a_newer_one_is(rig):
    rig.begin()
    for _ in range(3):
        rig.protect()
        for node in NODES:
            until(lambda node=node: rig.protected(node) in rig.held(node))
            until(lambda node=node: rig.protected(node) in {held.step for held in rig.stores[node].inventory()})


@pytest.mark.parametrize("every", [5, 7])
def test_only_steps_that_are_captured_are_granted(rig, every):
    rig.every = every
    rig.begin()
    assert rig.protect() % every == 0


@pytest.mark.parametrize("node", [1, 0], ids=["any", "the coordinator's"])
def test_parity_that_is_lost_with_a_keeper_is_said_to_be_lost(rig, node):
    rig.begin()
    rig.protect()
    told = {other: len(rig.told_to[other]) for other in NODES if other != node}
    rig.replace(node)

    def is_said(other):
        return any(isinstance(one, Protected) and one.step is None for one in list(rig.told_to[other])[told[other] :])

    until(lambda: all(map(is_said, told)))  # where slots still hold the step, it may be protected again at once
    rig.protect()  # again: also a step that was captured before


def test_what_a_dead_keeper_held_stays_until_a_newer_step_is_protected():
    """Where two nodes may be lost, that parity still helps."""
    rig = ParityRig(nodes=4, parity=2)
    try:
        rig.begin()
        rig.protect()
        until(lambda: len({rig.protected(node) for node in range(4)}) == 1)
        step = rig.protected()
        rig.replace(3)
        until(lambda: rig.protected(0) is None)
        assert all(step in rig.held(node) for node in range(4))
        rig.protect()
        until(lambda: all(step not in rig.held(node) for node in range(4)))
    finally:
        rig.close()


def test_a_report_of_a_keeper_without_a_link_does_not_count():
    """It may have died with its parity."""
    settings = LevelGrants(PersistentLevel("parity"), is_memory=True)
    coordinator = Coordinator(1, STARTS[0], 2, (settings,))

    def report(node, progress, grant, stored=()):
        said = LevelReport(grant, None, progress, True, stored, settings.grant_version)
        coordinator.receive(Report(node, coordinator.owner, (said,)))

    for node in range(2):
        report(node, Progress.IDLE, None)
    assert coordinator.decide(LocalView(3, frozenset({3})))
    step = settings.grant
    report(1, Progress.STORED, step, (step,))
    coordinator.forget(1)
    report(0, Progress.STORED, step, (step,))
    assert not coordinator.decide(LocalView(step, frozenset({step})))
    assert not settings.complete
    report(1, Progress.STORED, step, (step,))
    assert coordinator.decide(LocalView(step, frozenset({step})))
    assert settings.complete == {step}
    report(1, Progress.IDLE, None)
    assert coordinator.decide(LocalView(step, frozenset({step})))
    assert not settings.complete


def test_what_was_granted_and_not_protected_is_let_go_when_another_start_begins(rig):
    rig.settings = {"max_bytes_per_s": 1000}  # it takes minutes
    rig.begin()

    def is_held():
        rig.capture(rig.step + 2)
        return all(rig.held(node) for node in NODES)

    until(is_held)
    rig.begin(STARTS[1], follows=True)
    until(lambda: not any(rig.held(node) for node in NODES))
    rig.stop(0), rig.stop(1), rig.stop(2)
    until(lambda: not is_encoding())
    assert not any(store.inventory() for store in rig.stores)


def test_what_an_earlier_start_protected_stays_until_this_one_has(rig):
    rig.begin()
    rig.protect()
    until(lambda: len({rig.protected(node) for node in NODES}) == 1)
    step = rig.protected()
    rig.begin(STARTS[1], follows=True)
    until(lambda: all(rig.held(node) == {held.step for held in rig.stores[node].inventory()} for node in NODES))
    assert all(step <= held for node in NODES for held in rig.held(node))
    rig.step = max(rig.held(0))
    rig.protect()
    until(lambda: all({held.start for held in store.inventory()} == {STARTS[1]} for store in rig.stores))
    assert all(step not in rig.held(node) for node in NODES)


def test_slots_are_not_held_for_ever_where_there_are_too_few_to_protect_anything(rig):
    rig.begin()
    rig.protect()
    rig.settings = {"slots": 6}  # more than there are
    rig.begin(STARTS[1], follows=True)
    assert any(rig.held(node) for node in NODES)

    def is_free():
        rig.capture(rig.step + 2)
        return not any(rig.held(node) for node in NODES)

    until(is_free)


@pytest.fixture
def stands_in(rig):
    """Makes a keeper of a node whose reads are those of a test from now on; at its end the node's own are back."""

    @contextlib.contextmanager
    def stand_in(node, open):
        run, (host, port) = run_of(rig), rig.addresses[node]
        secret = run.peers.secret
        rig.reads[node].close()
        with contextlib.closing(PeerServer(secret, open, Deadlines(alive_s=0.1))) as server:
            server.listen(host, port)
            yield
        rig._serve(node, port)

    return stand_in


def refuse(what):
    raise CaptureAborted("this will never be")


def failures(rig, caplog):
    """Levels of what was logged of steps that could not be protected, after another one was captured."""
    rig.capture(rig.step + 2)
    return [record.levelno for record in caplog.records if "is not protected by other nodes" in record.getMessage()]


def test_a_peer_that_stands_still_is_reported_once_and_taken_back(rig, stands_in, caplog, monkeypatch):
    monkeypatch.setattr(peer_client, "ANSWER_S", 0.5)
    caplog.set_level(logging.INFO, "lazysnap")
    rig.begin()
    rig.protect()
    goes_on = threading.Event()

    def stall(what):
        goes_on.wait()
        refuse(what)

    with stands_in(2, stall):
        until(lambda: len(failures(rig, caplog)) > 4)
        goes_on.set()
    rig.protect()
    assert failures(rig, caplog).count(logging.WARNING) == 2  # of both others, once
    assert f"{rig.addresses[2][1]} cannot be read from: it does not answer in time" in caplog.text


def test_a_peer_that_stands_still_does_not_delay_the_report_of_another_one(rig):
    run = run_of(rig.begin())
    secret = run.peers.secret
    goes_on, errors = threading.Event(), []
    opens = [refuse, refuse, lambda what: goes_on.wait() and refuse(what)]
    servers = [PeerServer(secret, open, Deadlines(alive_s=0.1)) for open in opens]
    members = [(node, *server.listen("127.0.0.1")) for node, server in enumerate(servers)]
    parity = msgspec.structs.replace(run.parity, members=members)
    encoding = Encoding(parity, run, Team(), secret, RateLimiter(None))

    def encode():
        try:
            encoding.encode(2, ParityStore(), NodeSlots(lambda: rig.nodes[0], STARTS[0]), lambda: None)
        except PeerRefused as error:
            errors.append(error)

    encoder = threading.Thread(target=encode)
    encoder.start()
    encoder.join(TIMEOUT_S)
    goes_on.set()
    assert "this will never be" in str(errors)
    encoding.close()
    for server in servers:
        server.close()


def test_reads_that_wait_for_a_capture_end_with_their_server(rig):
    run = run_of(rig.begin())
    reader = PeerReader(run.peers.secret, rig.addresses[0])
    errors = []

    def read():
        try:
            reader.open(PartOf(STARTS[0], 100, 1))
        except KeeperError as error:
            errors.append(error)

    reading = threading.Thread(target=read)
    reading.start()

    def only_one():
        """All connections but that of the reader become links."""
        found = [thread for thread in threading.enumerate() if thread.name == "lazysnap-peer-connection"]
        return found if len(found) == 1 else None

    [server] = until(only_one)
    rig.reads[0].close()
    assert not server.is_alive()
    reading.join()
    assert errors
    reader.close()


def test_what_is_refused_again_and_again_says_why(rig, stands_in, monkeypatch):
    monkeypatch.setattr(protection, "_LATE_S", 0.5)
    monkeypatch.setattr(reminder, "_AGAIN_S", 0.5)
    rig.begin()
    rig.protect()

    def is_told():
        rig.capture(rig.step + 2)
        told = "".join(event.text for event in rig.told_to[0] if isinstance(event, Alert))
        return re.search(r"nothing was protected for \d+ s: step \d+: .*this will never be", told)

    with stands_in(2, refuse):
        until(is_told)


def test_a_node_whose_own_captures_are_the_last_to_be_whole_waits_for_them(rig):
    rig.begin()
    begun = [(rank, rank.begin(2, RUN)) for rank in rig.ranks]
    for rank, slot in begun[1:]:
        rank.finish(slot)
    rank, slot = begun[0]
    checks = iter(range(10_000))

    def check():
        if next(checks) == 500:  # long after all was read of the others
            rank.finish(slot)

    run = run_of(rig)
    secret = run.peers.secret
    encoding = Encoding(run.parity, run, Team(world_size=9), secret, RateLimiter(None))
    done = encoding.encode(2, ParityStore(), NodeSlots(lambda: rig.nodes[0], STARTS[0]), check)
    encoding.close()
    assert done.held.world_size == 9, "of all groups"
    assert slot.status().phase is SlotPhase.WHOLE


class Counting(RateLimiter):
    def __init__(self):
        super().__init__(None)
        self.taken = []

    def take(self, num_bytes, while_waiting):
        self.taken.append(num_bytes)
        super().take(num_bytes, while_waiting)


def test_all_that_is_read_of_others_waits_for_the_rate_that_parity_is_given(rig):
    run = run_of(rig.begin())
    rig.capture(2)
    secret, pace = run.peers.secret, Counting()
    encoding = Encoding(run.parity, run, Team(), secret, pace)
    done = encoding.encode(2, ParityStore(), NodeSlots(lambda: rig.nodes[0], STARTS[0]), lambda: None)
    encoding.close()
    sizes = tuple(member.size_bytes for member in done.held.members)
    assert sum(pace.taken) == 2 * Pieces(Group((0, 1, 2), 1), sizes, run.parity.block_bytes).piece_bytes
    assert sum(sizes) / 3 <= sum(pace.taken) < sum(sizes) / 2


def test_what_an_earlier_start_protected_is_not_counted_for_the_next():
    config = SnapshotConfig(job_id="protected")
    client = KeeperClient(JobIdentity.from_config(config), config)

    def begin(start):
        fields = {"every_n_steps": 1, "num_kept": 2, "stored": {}, "shared": [], "peers": None}
        client.adopt_run(Run(RUN, start, step=0, floor=0, is_new=True, **fields))

    def heard() -> list[KeeperEvent]:
        return [event for event in client.poll_events() if isinstance(event, Protected)]

    begin(STARTS[0])
    client._state.take(Status(STARTS[0], protected=8), ())
    assert [event.step for event in heard()] == [8]
    client._state.take(Status(STARTS[0], protected=9), ())  # nobody looks
    begin(STARTS[1])
    client._state.take(Status(STARTS[0], protected=10), ())
    assert heard() == []


def test_a_successor_holds_both_steps_until_an_order_says_which_one_is_protected():
    level = NodeLevel(is_memory=True)
    node, held = NodeGrants(1, "s1", (level,)), protection.HeldSteps("s1", level)
    held.inherit([RankView(20, False, (SlotView(20, True, hold=20), SlotView(10, True, hold=10)))])
    assert [held.stays(step, is_own=True) for step in (10, 20)] == [True, True]

    keys = StepKey(10, "s1"), StepKey(20, "s1")
    node.receive(Order(7, (LevelOrder(30, None, keys, (), (), grant_version=3),)))
    held.learn()

    assert [held.stays(step, is_own=True) for step in (10, 20, 30)] == [False, True, True]


def test_parity_goes_when_a_start_without_it_has_captures_of_its_own(rig):
    rig.begin()
    rig.protect()
    rig.parity = None
    rig.begin(STARTS[1], follows=True)
    assert any(store.inventory() for store in rig.stores)
    rig.capture(rig.step + 2)
    rig.capture(rig.step + 2)
    until(lambda: not any(store.inventory() for store in rig.stores))
