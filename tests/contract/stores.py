"""What must hold for snapshots at a place: whole or not there, whoever writes, whatever is damaged, whatever goes."""

import contextlib
import threading
from collections.abc import Callable

import pytest
from support.catalogue import inventory_of
from support.image import write_shard
from support.place import BLOCK, PAGE, WAIT_S, MakeStorage, Place, at_once, everything, in_another_process
from support.snapshots import MANIFEST, OTHER, RUN, SHARD, Snapshot, directory, look, read_whole

from lazysnap.errors import FormatError
from lazysnap.levels.blocks import verify
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import MemorySource
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import keep, release
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.resolver import Choice, candidates


def _flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    return flip


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "shard's header flipped": (SHARD, _flipped(60)),
    "shard's first byte flipped": (SHARD, _flipped(PAGE)),
    "shard's last byte flipped": (SHARD, _flipped(-1)),
    "shard cut": (SHARD, lambda data: data[:-1]),
    "shard longer": (SHARD, lambda data: data + b"\0"),
    "shard empty": (SHARD, lambda data: b""),
    "shard gone": (SHARD, lambda data: None),
    "manifest's first byte flipped": (MANIFEST, _flipped(0)),
    "manifest flipped": (MANIFEST, _flipped(99)),
    "manifest's last byte flipped": (MANIFEST, _flipped(-1)),
    "manifest cut": (MANIFEST, lambda data: data[:-1]),
    "manifest empty": (MANIFEST, lambda data: b""),
    "manifest gone": (MANIFEST, lambda data: None),
}
"""What can happen to a snapshot: to which file, and what is left of it."""


class HookedSource(MemorySource):
    """A source that does something on its way."""

    def __init__(self, snapshot: Snapshot, *, at: str, action: Callable[[], object]) -> None:
        source = snapshot.source()
        super().__init__(source.view(0, -(-source.size_bytes // PAGE) * PAGE), source.size_bytes)
        self._at = at
        self._action = action

    def view(self, offset: int, length: int) -> memoryview:
        """Once at the end of the image."""
        if self._at == "view" and offset + length >= self.size_bytes:
            self._action()
        return super().view(offset, length)

    def finish(self) -> None:
        """Once."""
        if self._at == "finish":
            self._action()


class StoreContract(Place):
    """What snapshots at a storage promise, as tests; see ``StorageContract``."""

    @pytest.mark.parametrize("elements", [0, 5000, BLOCK - PAGE, BLOCK - PAGE + 1, 2 * BLOCK + 1])
    def test_what_was_written_is_read_back(self, make_storage: MakeStorage, elements: int) -> None:
        """By another client, every byte, whatever the size."""
        storage, other = make_storage(), make_storage()
        manifest = write_shard(storage, Snapshot(1, elements=elements).meta, Snapshot(1, elements=elements).source())

        (entry,) = inventory_of(other).entries
        assert (entry.step, entry.run_id) == (1, RUN)
        assert FilePlace.of(other, entry).read_manifest() == manifest == verify(FilePlace.of(other, entry))
        read_whole(other, entry)
        assert everything(storage) == [f"{directory(1)}/{MANIFEST}", f"{directory(1)}/{SHARD}"]

    def test_an_empty_place_offers_nothing(self, storage: Storage) -> None:
        """And has no problem."""
        inventory = inventory_of(storage)
        assert (inventory.entries, inventory.problems) == ((), ())
        assert sweep(storage) == []

    @pytest.mark.parametrize("at", ["view", "finish"])
    def test_an_aborted_capture_leaves_nothing(self, storage: Storage, at: str) -> None:
        """At the last block, or after it."""

        def abort() -> None:
            raise CaptureAborted("torn")

        Snapshot(1).write(storage)
        before = everything(storage)
        snapshot = Snapshot(2, elements=BLOCK)
        with pytest.raises(CaptureAborted):
            write_shard(storage, snapshot.meta, HookedSource(snapshot, at=at, action=abort))

        assert everything(storage) == before
        assert look(storage).steps() == [1]

    def test_nothing_is_offered_before_the_commit(self, make_storage: MakeStorage) -> None:
        """Not to another client either."""
        storage, other, seen = make_storage(), make_storage(), []
        Snapshot(1).write(storage)
        snapshot = Snapshot(2)
        write_shard(
            storage, snapshot.meta, HookedSource(snapshot, at="finish", action=lambda: seen.append(look(other)))
        )

        assert seen[0].steps() == [1]
        assert seen[0].problems == ()
        assert look(other).steps() == [1, 2]

    def test_a_snapshot_is_complete_with_its_last_rank(self, make_storage: MakeStorage) -> None:
        """Each rank writes for itself."""
        for rank in range(3):
            assert candidates([inventory_of(make_storage())]) == []
            Snapshot(5, rank=rank, world_size=3).write(make_storage())
        (plan,) = candidates([inventory_of(make_storage())])
        assert (plan.step, plan.world_size) == (5, 3)
        for (entry,) in plan.sources:
            read_whole(make_storage(), entry)

    def test_the_ranks_of_a_step_may_write_at_once(self, make_storage: MakeStorage) -> None:
        """Into one directory, while others are swept and removed."""
        errors = at_once(*[Snapshot(5, rank=rank, world_size=4).write_later(make_storage()) for rank in range(4)])
        assert errors == [None] * 4
        (plan,) = candidates([inventory_of(make_storage())])
        assert len({entry.snapshot.directory for (entry,) in plan.sources}) == 1

    def test_one_store_writes_several_steps_at_once(self, storage: Storage) -> None:
        """It is thread-safe for different steps."""
        errors = at_once(*[Snapshot(step, elements=50_000).write_later(storage) for step in range(1, 7)])
        assert errors == [None] * 6
        assert look(storage).steps() == [1, 2, 3, 4, 5, 6]

    def test_the_same_step_of_another_run_is_beside_it(self, make_storage: MakeStorage) -> None:
        """And is left alone when the first run's goes."""
        for run_id in (RUN, OTHER):
            for step in (1, 2):
                Snapshot(step, run_id).write(make_storage())
        storage = make_storage()
        assert look(storage).steps(RUN) == look(storage).steps(OTHER) == [1, 2]
        assert Snapshot(1, OTHER).delete(storage)
        assert look(storage).steps(RUN) == [1, 2]
        assert look(storage).steps(OTHER) == [2]

    def test_the_same_step_of_a_later_start_is_beside_it(self, storage: Storage) -> None:
        """A resumed run passes a step again, perhaps with other bytes; the older one may go."""
        Snapshot(1).write(storage)
        again = Snapshot(1, elements=6000, start="2" * 16)
        again.write(storage)
        assert look(storage).steps() == [1, 1]
        assert candidates([inventory_of(storage)])[0].start == again.start

        assert Snapshot(1).delete(storage)
        (entry,) = look(storage).whole
        assert entry.start == again.start
        assert len(everything(storage)) == 2

    def test_what_is_committed_is_not_written_again(self, make_storage: MakeStorage) -> None:
        """A keeper that takes over may bring the same capture once more."""
        Snapshot(1).write(make_storage())
        (before,) = inventory_of(make_storage()).entries
        made = FilePlace.of(make_storage(), before).read_manifest()
        assert Snapshot(1).write(make_storage()) == before
        assert FilePlace.of(make_storage(), before).read_manifest() == made

    def test_writers_of_one_step_of_several_runs_are_all_served(self, make_storage: MakeStorage) -> None:
        """At once, each with a client of its own."""
        runs = [f"{number}" * 16 for number in range(4)]
        errors = at_once(*[Snapshot(7, run_id, elements=50_000).write_later(make_storage()) for run_id in runs])

        findings = look(make_storage())
        assert [error for error in errors if error is not None] == []
        assert findings.problems == ()
        assert sorted(entry.run_id for entry in findings.whole) == runs
        assert len(everything(make_storage())) == 8

    def test_a_job_that_runs_twice_loses_nothing(self, make_storage: MakeStorage) -> None:
        """Each start writes its own snapshot of a step: all of them are whole."""
        for step in (1, 2):
            errors = at_once(
                *[
                    Snapshot(step, elements=50_000, start=f"{number}" * 16).write_later(make_storage())
                    for number in (1, 2, 3)
                ]
            )
            assert errors == [None] * 3
            findings = look(make_storage())
            assert findings.problems == ()
            assert findings.steps() == sorted(3 * list(range(1, step + 1)))

    def test_damage_of_every_kind_is_found(self, make_storage: MakeStorage) -> None:
        """Before a byte of it is believed, by one who knew it and one who did not."""
        storage = make_storage()
        for step in range(1, 2 + len(DAMAGES)):
            Snapshot(step).write(storage)
        for step, (file, damage) in enumerate(DAMAGES.values(), 2):
            path = f"{directory(step)}/{file}"
            damaged = damage(storage.get(path))
            storage.delete(path)
            if damaged is not None:
                storage.put(path, damaged)

        steps = {directory(step): name for step, name in enumerate(DAMAGES, 2)}
        for client in (storage, make_storage()):
            findings = look(client)
            assert findings.steps() == [1]
            said = {name for there, name in steps.items() if any(there in text for text in findings.problems)}
            assert said == set(DAMAGES) - {"manifest gone"}
            assert len(findings.problems) == len(said)
            for entry in inventory_of(client).entries:
                if entry.step != 1:
                    assert "shard" in steps[directory(entry.step)]
                    assert "flipped" in steps[directory(entry.step)], "what is lost or cut is not even offered"
                    with pytest.raises(FormatError):
                        verify(FilePlace.of(client, entry))

    def test_nothing_is_left_of_what_is_deleted(self, make_storage: MakeStorage) -> None:
        """And the others stay; what is not there any more is deleted without complaint."""
        storage = make_storage()
        for step in (1, 2, 3):
            Snapshot(step).write(storage)
        for step in (1, 2, 2):
            assert Snapshot(step).delete(make_storage())
        assert look(storage).steps() == [3]
        assert len(everything(storage)) == 2
        assert directory(1) not in storage.list()

    def test_a_name_keeps_a_snapshot_until_it_is_taken_away(self, make_storage: MakeStorage) -> None:
        """Two names need both to go; the same step again leaves the named one."""
        storage = make_storage()
        entry = Snapshot(1).write(storage)
        for name in ("first", "before-anneal_v1.2"):
            keep(storage, entry.snapshot, name)
        again = Snapshot(1, elements=6000, start="2" * 16)
        again.write(storage)
        named = [entry for entry in inventory_of(make_storage()).entries if entry.names]
        assert [(entry.step, sorted(entry.names)) for entry in named] == [(1, ["before-anneal_v1.2", "first"])]
        assert not Snapshot(1).delete(make_storage())
        assert again.delete(make_storage())
        assert look(storage).steps() == [1]
        assert [plan.step for plan in candidates([inventory_of(make_storage())], Choice(name="first"))] == [1]

        assert release(make_storage(), RUN, "first") == [entry.snapshot.directory]
        assert not Snapshot(1).delete(storage)
        assert look(storage).steps() == [1]
        assert release(make_storage(), None, "before-anneal_v1.2") == [entry.snapshot.directory]
        assert Snapshot(1).delete(storage)
        assert everything(storage) == []

    def test_what_is_being_read_is_deleted_and_read_to_its_end(self, make_storage: MakeStorage) -> None:
        """Where an open file stays readable; elsewhere the reader is told that the object is gone."""
        storage, reader = make_storage(), make_storage()
        entry = Snapshot(1, elements=2 * BLOCK).write(storage)
        went: list[bool] = []
        is_first = threading.Lock()  # several threads may read

        def delete(num_bytes: int) -> None:
            if is_first.acquire(blocking=False):
                went.append(Snapshot(1).delete(make_storage()))

        (error,) = at_once(lambda: read_whole(reader, entry, delete))
        assert went == [True]
        # NFS keeps the directory of a deleted file while that is open.
        assert [path for path in everything(storage) if not path.endswith("/")] == []
        if self.keeps_open_files:
            assert error is None
        else:
            assert isinstance(error, FileNotFoundError | None)

    def test_a_sweep_leaves_snapshots_and_living_writers_alone(self, make_storage: MakeStorage) -> None:
        """Whoever sweeps, also in the middle of a write."""
        storage, swept = make_storage(), list[str]()
        Snapshot(1).write(storage)
        snapshot = Snapshot(2, elements=BLOCK)

        def sweep_meanwhile() -> None:
            swept.extend(sweep(make_storage()))

        for at in ("view", "finish"):
            write_shard(storage, snapshot.meta, HookedSource(snapshot, at=at, action=sweep_meanwhile))
            swept += sweep(make_storage())
        assert swept == []
        assert set(look(storage).steps()) == {1, 2}
        assert look(storage).problems == ()

    def test_a_reader_sees_what_others_change(self, make_storage: MakeStorage) -> None:
        """What it knows from before is no reason to offer what is gone."""
        storage, reader = make_storage(), make_storage()
        Snapshot(1).write(storage)
        assert look(reader).steps() == [1]
        Snapshot(2).write(storage)
        assert look(reader).steps() == [1, 2]
        assert Snapshot(1).delete(storage)
        assert look(reader).steps() == [2]
        assert look(reader).problems == ()

    def test_a_writer_that_was_killed_is_in_nobodys_way(self, make_storage: MakeStorage, elsewhere: str | None) -> None:
        """Nothing of it is offered; the next one writes the same step, and what it left is swept."""
        code = f"""
from support.image import write_shard
from support.snapshots import Snapshot
from contract.stores import HookedSource
snapshot = Snapshot(2, elements={BLOCK})
def stop():
    say("written")
    wait()
write_shard(storage, snapshot.meta, HookedSource(snapshot, at="finish", action=stop))
"""
        storage = make_storage()
        Snapshot(1).write(storage)
        with in_another_process(elsewhere, code) as child:
            assert child.next_line() == "written"
            child.kill()
        assert look(storage).steps() == [1]
        assert look(storage).problems == ()
        Snapshot(2).write(storage)
        sweep(storage)
        assert look(storage).steps() == [1, 2]
        if self.notices_death:
            assert len(everything(storage)) == 4

    def test_a_long_read_and_a_deletion_do_not_wait_for_each_other(self, make_storage: MakeStorage) -> None:
        """A reader that stands still holds its own snapshot only."""
        storage, reading, go_on = make_storage(), threading.Event(), threading.Event()
        entry = Snapshot(1).write(storage)
        Snapshot(2).write(storage)

        def stand_still(num_bytes: int) -> None:
            reading.set()
            assert go_on.wait(WAIT_S)

        with contextlib.ExitStack() as stack:
            stack.callback(go_on.set)
            errors: list[BaseException | None] = []
            reader = make_storage()
            thread = threading.Thread(
                target=lambda: errors.extend(at_once(lambda: read_whole(reader, entry, stand_still))), daemon=True
            )
            thread.start()
            assert reading.wait(WAIT_S)
            assert Snapshot(1).delete(make_storage())
            assert Snapshot(2).delete(make_storage())
        thread.join(WAIT_S)
        if self.keeps_open_files:
            assert errors == [None]
        assert [error for error in errors if not isinstance(error, FileNotFoundError | None)] == []
