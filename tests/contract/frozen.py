"""What must hold for the frozen tensors that snapshots share: stored once per level."""

from collections.abc import Callable

import pytest
from support.catalogue import inventory_of
from support.place import MakeStorage, Place, at_once, everything
from support.snapshots import MANIFEST, OTHER, RUN, SHARD, Snapshot, look, overwrite, read_image, verified

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.source import shard_of
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import candidates
from lazysnap.shard.manifest import FrozenReference


def base_of(number: int = 1, run_id: str = RUN) -> Snapshot:
    """A file of frozen tensors."""
    return Snapshot(0, run_id, 7000 + number, seed=number)


def with_base(step: int, base: Snapshot) -> Snapshot:
    """A snapshot that refers to it."""
    return Snapshot(step, base.run_id, frozen=FrozenReference(base.digest, len(base.image)))


def write_base(store: SnapshotStore, base: Snapshot) -> None:
    """Write and commit it."""
    store.write_frozen(shard_of(base.meta, base.source()), base.source(), base.digest)


class FrozenContract(Place):
    """Files of frozen tensors; see ``StoreContract``."""

    @pytest.fixture
    def make_store(self, make_storage: MakeStorage) -> Callable[[], SnapshotStore]:
        """Makes stores, each with a client of its own."""
        return lambda: SnapshotStore(make_storage())

    @pytest.fixture
    def store(self, make_store: Callable[[], SnapshotStore]) -> SnapshotStore:
        """One of them."""
        return make_store()

    def test_frozen_tensors_are_stored_once(self, make_store: Callable[[], SnapshotStore]) -> None:
        """For all snapshots of the run that refer to them, whoever writes; and found again."""
        base = base_of()
        errors = at_once(*[lambda: write_base(make_store(), base) for _ in range(4)])
        assert [error for error in errors if not isinstance(error, LevelError | None)] == []
        write_base(make_store(), base)
        for step in (1, 2):
            with_base(step, base).write(make_store())

        store = make_store()
        (image,) = inventory_of(store).frozen
        assert image.digest == base.digest
        out = memoryview(bytearray(len(base.image)))
        read_image(store, image, out)
        assert out == base.image
        assert len(everything(store.storage)) == 6
        assert [list(plan.frozen) for plan in candidates([inventory_of(store)])] == [[base.digest]] * 2

    def test_frozen_tensors_of_another_content_are_not_committed(self, store: SnapshotStore) -> None:
        """Their content is their name."""
        base = base_of()
        with pytest.raises(FormatError):
            store.write_frozen(shard_of(base.meta, base_of(2).source()), base_of(2).source(), base.digest)
        assert everything(store.storage) == []

    def test_frozen_tensors_are_shared_by_runs_and_outlive_their_snapshots(
        self, make_store: Callable[[], SnapshotStore]
    ) -> None:
        """No writer of snapshots knows who else refers to them: ``lazysnap prune`` deletes them."""
        store = make_store()
        for run_id in (RUN, OTHER):
            write_base(make_store(), base_of(1, run_id))
            for step in (1, 2):
                with_base(step, base_of(1, run_id)).write(store)
        assert with_base(1, base_of()).delete(make_store())
        assert [image.digest for image in inventory_of(make_store()).frozen] == [base_of().digest]
        assert (look(make_store()).steps(RUN), look(make_store()).steps(OTHER)) == ([2], [1, 2])

    def test_damaged_frozen_tensors_are_written_again(self, make_store: Callable[[], SnapshotStore]) -> None:
        """By the next writer that needs them."""
        store, base = make_store(), base_of()
        write_base(store, base)
        (image,) = inventory_of(store).frozen
        overwrite(store.storage, f"{image.location}/{SHARD}", b"damaged")
        write_base(make_store(), base)
        verified(make_store(), image)

    def test_a_snapshot_without_its_frozen_tensors_is_no_candidate(
        self, make_store: Callable[[], SnapshotStore]
    ) -> None:
        """The older complete one is."""
        store, base = make_store(), base_of()
        Snapshot(1).write(store)
        write_base(store, base)
        with_base(2, base).write(store)
        (image,) = inventory_of(store).frozen
        overwrite(store.storage, f"{image.location}/{MANIFEST}", b"damaged")

        assert [plan.step for plan in candidates([inventory_of(make_store())])] == [1]

    def test_damaged_frozen_tensors_are_found(self, make_store: Callable[[], SnapshotStore]) -> None:
        """Before a byte of them is believed."""
        store, base = make_store(), base_of()
        write_base(store, base)
        (image,) = inventory_of(store).frozen
        path = f"{image.location}/{SHARD}"
        data = store.storage.get(path)
        overwrite(store.storage, path, data[:-1] + bytes([data[-1] ^ 1]))

        with pytest.raises(FormatError):
            verified(make_store(), image)
