"""What must hold for the immutable tensors that the snapshots of a run share: stored once, gone with the last."""

from collections.abc import Callable

import pytest

from lazysnap.errors import LevelError, ShardCorrupt
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import candidates
from lazysnap.shard.manifest import FrozenReference
from lazysnap.testing.place import MakeStorage, Place, at_once, everything
from lazysnap.testing.snapshots import MANIFEST, OTHER, RUN, SHARD, Snapshot, level, look, overwrite


def base_of(number: int = 1, run_id: str = RUN) -> Snapshot:
    """An image of immutable tensors."""
    return Snapshot(0, run_id, 7000 + number)


def with_base(step: int, base: Snapshot) -> Snapshot:
    """A snapshot that refers to it."""
    return Snapshot(step, base.run_id, frozen=FrozenReference(base.digest, len(base.image)))


def write_base(store: SnapshotStore, base: Snapshot) -> None:
    """Write and commit it."""
    store.write_frozen(base.meta, base.source(), base.digest)


class ImmutableContract(Place):
    """Images of immutable tensors; see ``StoreContract``."""

    @pytest.fixture
    def make_store(self, make_storage: MakeStorage) -> Callable[[], SnapshotStore]:
        """Makes stores, each with a client of its own."""
        return lambda: SnapshotStore(make_storage())

    @pytest.fixture
    def store(self, make_store: Callable[[], SnapshotStore]) -> SnapshotStore:
        """One of them."""
        return make_store()

    def test_immutable_tensors_are_stored_once(self, make_store: Callable[[], SnapshotStore]) -> None:
        """For all snapshots of the run that refer to them, whoever writes; and found again."""
        base = base_of()
        errors = at_once(*[lambda: write_base(make_store(), base) for _ in range(4)])
        assert [error for error in errors if not isinstance(error, LevelError | None)] == []
        write_base(make_store(), base)
        for step in (1, 2):
            with_base(step, base).write(make_store())

        store = make_store()
        (image,) = store.inventory().frozen
        assert (image.run_id, image.digest) == (RUN, base.digest)
        out = memoryview(bytearray(len(base.image)))
        store.read_image(image, store.read_manifest(image), out)
        assert out == base.image
        assert len(everything(store.storage)) == 6
        assert [list(plan.frozen) for plan in candidates([store.inventory()])] == [[base.digest]] * 2

    def test_immutable_tensors_of_another_content_are_not_committed(self, store: SnapshotStore) -> None:
        """Their content is their name."""
        base = base_of()
        with pytest.raises(ShardCorrupt):
            store.write_frozen(base.meta, base_of(2).source(), base.digest)
        assert everything(store.storage) == []

    def test_immutable_tensors_go_with_the_last_snapshot_that_refers_to_them(
        self, make_store: Callable[[], SnapshotStore]
    ) -> None:
        """Of their own run; and while someone holds them they stay."""
        first, second, other = base_of(1), base_of(2), base_of(1, OTHER)
        store = make_store()
        for base in (first, second, other):
            write_base(store, base)
        for step, base in ((1, first), (2, first), (3, second)):
            with_base(step, base).write(store)
        with_base(1, other).write(store)

        def digests() -> set[tuple[str, str]]:
            return {(image.run_id, image.digest) for image in make_store().inventory().frozen}

        assert make_store().retain(level(2), RUN) == [1]
        assert digests() == {(RUN, first.digest), (RUN, second.digest), (OTHER, other.digest)}
        if self.has_leases:
            with make_store().frozen_lease(RUN, first.digest):
                assert make_store().retain(level(1), RUN) == [2]
                assert (RUN, first.digest) in digests()
        make_store().retain(level(1), RUN)
        assert digests() == {(RUN, second.digest), (OTHER, other.digest)}
        assert look(make_store()).steps(RUN) == [3]
        assert look(make_store()).steps(OTHER) == [1]
        assert len(everything(store.storage)) == 8

    def test_a_snapshot_without_its_immutable_tensors_is_no_candidate(
        self, make_store: Callable[[], SnapshotStore]
    ) -> None:
        """Nor counted by retention: the older complete one stays."""
        store, base = make_store(), base_of()
        Snapshot(1).write(store)
        write_base(store, base)
        with_base(2, base).write(store)
        (image,) = store.inventory().frozen
        overwrite(store.storage, f"{image.location}/{MANIFEST}", b"damaged")

        assert [plan.step for plan in candidates([make_store().inventory()])] == [1]
        assert make_store().retain(level(1), RUN) == []
        assert 1 in look(make_store()).steps()

    def test_damaged_immutable_tensors_are_found(self, make_store: Callable[[], SnapshotStore]) -> None:
        """Before a byte of them is believed."""
        store, base = make_store(), base_of()
        write_base(store, base)
        (image,) = store.inventory().frozen
        path = f"{image.location}/{SHARD}"
        data = store.storage.get(path)
        overwrite(store.storage, path, data[:-1] + bytes([data[-1] ^ 1]))

        with pytest.raises(ShardCorrupt):
            make_store().verify_entry(image)
