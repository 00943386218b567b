"""What must hold for snapshots at a place that breaks: at every operation, in every way."""

import contextlib
import errno
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from support.catalogue import inventory_of
from support.fault_plan import CHANGES, DATA_OPERATIONS, Fail, Fault, FaultPlan, Flip, Hang, Truncate
from support.faulty import FaultyStorage
from support.place import BLOCK, WAIT_S, MakeStorage, Place, everything, write_object
from support.snapshots import RUN, SHARD, Snapshot, directory, look

from lazysnap.errors import LazySnapError, LevelError
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.node_file import FilePlace, delete_files
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import keep, release
from lazysnap.levels.watchdog import Beat, LevelHangs, Watchdog
from lazysnap.levels.watched import WatchedStorage
from lazysnap.resolver import candidates

Work = Callable[[Storage], object]


@dataclass(frozen=True)
class Scenario:
    """Something that is done to a place that holds the snapshots 1 and 2, and what may be gone after it."""

    work: Work
    prepare: Work = lambda storage: None
    may_go: frozenset[int] = frozenset()


def _write(storage: Storage) -> None:
    Snapshot(3, elements=BLOCK).write(storage)  # two blocks


def _write_again(storage: Storage) -> None:
    Snapshot(2, elements=6000, start="2" * 16).write(storage)


def _delete(storage: Storage) -> None:
    Snapshot(1).delete(storage)


def _leave_rests(storage: Storage) -> None:
    for step in (2, 3):
        write_object(storage, f"{directory(step, start='9' * 16)}/{SHARD}", b"left by the dead")


def _sweep(storage: Storage) -> None:
    sweep(storage)


def _read(storage: Storage) -> None:
    look(storage)


def _name(storage: Storage) -> None:
    for entry in inventory_of(storage).entries:
        keep(storage, entry.snapshot, f"name-{entry.step}")
    release(storage, RUN, "name-1")


SCENARIOS = {
    "write": Scenario(_write),
    "write again": Scenario(_write_again),
    "delete": Scenario(_delete, may_go=frozenset({1})),
    "sweep": Scenario(_sweep, _leave_rests),
    "read": Scenario(_read),
    "name": Scenario(_name),
}
FAULTS: dict[str, Callable[[int], Fault]] = {
    "fails before": lambda n: Fail(n),
    "fails after": lambda n: Fail(n, after=True),
    "full": lambda n: Fail(n, error=errno.ENOSPC),
    "is away from then on": lambda n: Fail(n, error=errno.ESTALE, lasting=True),
    "answers nothing from then on": lambda n: Fail(n, after=True, lasting=True),
    "loses the end": lambda n: Truncate(n),
    "loses the end in silence": lambda n: Truncate(n, claims_success=True),
    "flips a bit": lambda n: Flip(n),
}


def _concerns(fault: Fault, operation: str) -> bool:
    """Whether it makes a difference there."""
    if isinstance(fault, Flip):
        return operation in DATA_OPERATIONS
    if isinstance(fault, Truncate):
        return operation in DATA_OPERATIONS or (operation == "list" and fault.claims_success)
    return not (isinstance(fault, Fail) and fault.after) or operation in CHANGES or fault.lasting


def _needed(storage: Storage) -> list[str]:
    """The objects of all that is offered."""
    inventory = inventory_of(storage)
    directories = {entry.snapshot.directory for entry in inventory.entries}
    objects = {f"{name}/node-00000-of-00001.{kind}" for name in directories for kind in ("safetensors", "json")}
    names = {f"{entry.snapshot.directory}/keep-{given}" for entry in inventory.entries for given in entry.names}
    return sorted(objects | names)


_DRY_RUNS: dict[tuple[type, Scenario], list[str]] = {}


class BreakageContract(Place):
    """What snapshots at a storage that fails promise, as tests; see ``StorageContract``."""

    every = 1
    """Try each ``every``-th operation only, where a place is slow; which ones, differs from fault to fault."""

    @pytest.fixture
    def no_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Objects without a writer count as abandoned and settled at once, so that a sweep removes them."""
        monkeypatch.setattr(Storage, "abandoned_after_s", -3600.0)

    def _prepared(self, make_storage: MakeStorage, name: str, scenario: Scenario) -> Storage:
        storage = make_storage(name)
        for step in (1, 2):
            Snapshot(step).write(storage)
        scenario.prepare(storage)
        return storage

    def _chosen(self, operations: list[tuple[int, str]], salt: str) -> list[tuple[int, str]]:
        first = zlib.crc32(salt.encode()) % min(self.every, max(1, len(operations)))
        return operations[first :: self.every]

    def _operations(self, make_storage: MakeStorage, scenario: Scenario) -> list[str]:
        """What the scenario does when nothing fails: the same each time, so a dry run serves all faults."""
        key = (type(self), scenario)
        if key not in _DRY_RUNS:
            storage = self._prepared(make_storage, "dry", scenario)
            plan = FaultPlan()
            scenario.work(FaultyStorage(storage, plan))
            assert plan.operations
            _DRY_RUNS[key] = plan.operations
        return _DRY_RUNS[key]

    def _check(self, make_storage: MakeStorage, name: str, scenario: Scenario, *, is_silent: bool) -> None:
        """What must hold when the place is well again: for a restart, and for the run that goes on."""
        storage = make_storage(name)
        findings = look(storage)
        # What was whole before and need not go is whole, and there is a candidate.
        assert set(findings.steps()) >= {1, 2} - scenario.may_go, findings.problems
        assert findings.steps()
        assert candidates([inventory_of(storage)])
        # Unless bytes were lost in silence there is nothing to complain of.
        assert is_silent or findings.problems == ()

        # The run goes on, and nothing stays that nobody needs.
        newest = Snapshot(9).write(storage)
        for entry in inventory_of(storage).entries:
            assert entry == newest or delete_files([FilePlace.of(storage, entry)]) != bool(entry.names)
        assert 9 in look(storage).steps()
        sweep(storage)
        if not is_silent:
            assert everything(storage) == _needed(storage)

    @pytest.mark.usefixtures("no_patience")
    @pytest.mark.parametrize("how", FAULTS)
    @pytest.mark.parametrize("what", SCENARIOS)
    def test_at_every_operation(self, make_storage: MakeStorage, what: str, how: str) -> None:
        """What is offered is whole or said to be bad; older snapshots stay; the next one works; no garbage stays."""
        scenario = SCENARIOS[what]
        operations = enumerate(self._operations(make_storage, scenario), 1)
        concerned = [(n, operation) for n, operation in operations if _concerns(FAULTS[how](n), operation)]
        for n, operation in self._chosen(concerned, f"{what} {how}"):
            fault = FAULTS[how](n)
            storage = self._prepared(make_storage, f"n{n}", scenario)
            plan = FaultPlan(fault)
            # It may fail, or not notice; what it raises is one of ours.
            with contextlib.suppress(LazySnapError, FileNotFoundError):
                scenario.work(FaultyStorage(storage, plan))
            assert fault in plan.happened
            is_silent = isinstance(fault, Flip) or (isinstance(fault, Truncate) and fault.claims_success)
            try:
                self._check(make_storage, f"n{n}", scenario, is_silent=is_silent)
            except (AssertionError, LevelError) as error:
                raise AssertionError(f"{what}: {operation}, operation {n}, {how}: {error}") from error

    @pytest.mark.usefixtures("no_patience")
    @pytest.mark.parametrize("what", SCENARIOS)
    def test_a_hang_is_a_deadline(self, make_storage: MakeStorage, what: str) -> None:
        """At every operation; and when it comes back, what was given up leaves nothing half behind."""
        scenario = SCENARIOS[what]
        for n, operation in self._chosen(list(enumerate(self._operations(make_storage, scenario), 1)), what):
            storage = self._prepared(make_storage, f"n{n}", scenario)
            plan, ended = FaultPlan(Hang(n)), threading.Event()

            def work(
                beat: Beat, storage: Storage = storage, plan: FaultPlan = plan, ended: threading.Event = ended
            ) -> None:
                try:
                    scenario.work(WatchedStorage(FaultyStorage(storage, plan), beat))
                finally:
                    ended.set()

            try:
                attempt = Watchdog(work, what, 0.01)
                assert plan.hanging.wait(WAIT_S)
                with pytest.raises(LevelHangs):
                    attempt.result()
                assert not attempt.wait(0)
                num_before = len(plan.operations)
            finally:
                plan.release()
            assert ended.wait(WAIT_S)
            later = set(plan.operations[num_before:])
            assert not later & (CHANGES - {"write"}), "a block that another thread writes is in a file of its own"
            try:
                self._check(make_storage, f"n{n}", scenario, is_silent=False)
            except (AssertionError, LevelError) as error:
                raise AssertionError(f"{what}: {operation}, operation {n}: {error}") from error
