"""A real disk that fills up at any operation, answers that are lost, and that the storage which breaks does break."""

import os
import subprocess

import pytest
from snapshots import mount
from support.fault_plan import Act, Fail, FaultPlan, Flip, Truncate
from support.faulty import FaultyStorage
from support.place import everything, pattern, read_object, read_range, write_object
from support.snapshots import Snapshot, look

from lazysnap.errors import FormatError, LazySnapError, LevelError
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.local import LocalStorage

PATH = "step-00000001/object"


def endless(file) -> None:
    while True:
        file.write(bytes(4096))


@pytest.fixture
def local(tmp_path):
    return LocalStorage(str(tmp_path / "run"))


def test_a_dry_run_names_every_operation(local):
    plan = FaultPlan()
    storage = FaultyStorage(local, plan)
    write_object(storage, PATH, b"x" * 5000)
    read_object(storage, PATH)
    storage.put("step-00000001/small", b"small")
    storage.get("step-00000001/small")
    storage.stamp(PATH)
    storage.list()
    storage.delete(PATH)
    storage.delete_abandoned("step-00000001/small")
    storage.delete_directory("step-00000001")
    storage.abort_stale()

    names = "create write publish size reader read_into put get stamp list delete"
    assert plan.operations == [*names.split(), "delete_abandoned", "delete_directory", "abort_stale"]
    assert plan.happened == []
    assert everything(local) == []


@pytest.mark.parametrize("claims_success", [False, True])
def test_what_is_truncated_lost_its_end(local, claims_success):
    data = pattern(1000)
    local.put("step-00000001/whole", data)

    def storage(operation: str) -> FaultyStorage:
        return FaultyStorage(local, FaultPlan(Truncate(1, operation=operation, claims_success=claims_success)))

    out = memoryview(bytearray(1000))
    works = {
        "put": (lambda: storage("put").put("step-00000001/put", data), LevelError),
        "get": (lambda: storage("get").get("step-00000001/whole"), FormatError),
        "read_into": (lambda: read_range(storage("read_into"), "step-00000001/whole", 0, out), FormatError),
        "write": (lambda: write_object(storage("write"), "step-00000001/written", data), LevelError),
    }
    for work, error in works.values():
        if not claims_success:
            with pytest.raises(error):
                work()
        elif (got := work()) is not None:
            assert got == data[:500]

    assert out == data[:500] + bytes(500)
    assert local.get("step-00000001/put") == data[:500]
    assert local.list("step-00000001") == (["put", "whole", "written"] if claims_success else ["put", "whole"])
    if claims_success:
        assert local.get("step-00000001/written") == data[:500] + bytes(500)
    assert storage("list").list("step-00000001") == local.list("step-00000001")[:-1]


def test_what_is_flipped_differs_in_one_bit_and_only_there(local):
    data = pattern(100)
    written = memoryview(bytearray(data))
    FaultyStorage(local, FaultPlan(Flip(1))).put("step-00000001/put", data)
    write_object(FaultyStorage(local, FaultPlan(Flip(1, operation="write"))), "step-00000001/written", data)
    local.put("step-00000001/whole", data)
    got = FaultyStorage(local, FaultPlan(Flip(1))).get("step-00000001/whole")
    out = memoryview(bytearray(100))
    read_range(FaultyStorage(local, FaultPlan(Flip(1, operation="read_into"))), "step-00000001/whole", 0, out)

    for bad in (local.get("step-00000001/put"), local.get("step-00000001/written"), got, bytes(out)):
        assert len(bad) == 100
        assert sum((one ^ other).bit_count() for one, other in zip(bad, data, strict=True)) == 1
    assert written == data
    assert local.get("step-00000001/whole") == data


def test_a_disk_that_fills_up_at_any_operation_of_a_write_leaves_what_was_there(tmp_path):
    """A real full tmpfs, without space for one more byte or name."""
    small = tmp_path / "small"
    mount(small, "256k")
    try:
        local = LocalStorage(str(small / "run"))
        Snapshot(1).write(local)
        dry = FaultPlan()
        Snapshot(2).write(FaultyStorage(local, dry))

        def fill() -> None:
            with pytest.raises(OSError, match="No space left"), open(small / "filler", "wb", buffering=0) as filler:
                endless(filler)

        for step, n in enumerate(range(1, len(dry.operations) + 1), 3):
            before = everything(local)
            full = FaultyStorage(local, FaultPlan(Act(n, action=fill)))
            with pytest.raises(LevelError, match="free space"):
                Snapshot(step).write(full)

            # Also while it is still full what was there can be read.
            assert everything(local) == before
            assert look(local).steps() == [1, 2]
            assert look(local).problems == ()
            os.unlink(small / "filler")

        Snapshot(100).write(local)
        assert look(local).steps() == [1, 2, 100]
        assert len(everything(local)) == 6
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("operation", ["publish", "put"])
def test_an_answer_that_is_lost_costs_that_snapshot_only(local, operation, a_day_later):
    Snapshot(1).write(local)
    faulty = FaultyStorage(local, FaultPlan(Fail(1, operation=operation, after=True)))
    try:
        Snapshot(2).write(faulty)
        expected = [1, 2]
    except LazySnapError:
        expected = [1]

    assert look(local).steps() == expected
    assert look(local).problems == ()
    sweep(local)
    assert len(everything(local)) == 2 * len(expected)
