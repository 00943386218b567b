"""What a storage must do with objects that are being written, and with those who write and read them."""

import contextlib
import threading

import pytest
from support.place import (
    BLOCK,
    PAGE,
    WAIT_S,
    MakeStorage,
    Place,
    at_once,
    blocks,
    everything,
    in_another_process,
    pattern,
    read_object,
    write_blocks,
    write_object,
)

from lazysnap.errors import LevelError
from lazysnap.levels.storage import Storage

SHARD = "step-00000001/node-00000-of-00001.safetensors"
MANIFEST = "step-00000001/node-00000-of-00001.json"
DATA = pattern(3 * PAGE + 1)


def _visible(storage: Storage) -> list[str]:
    """Objects that look like a shard or manifest; a place may have other names for what is not whole."""
    return [path for path in everything(storage) if path in (SHARD, MANIFEST)]


class WriterContract(Place):
    """Claims, publishing, races, abandoned objects."""

    def test_nothing_is_visible_before_publish(self, make_storage: MakeStorage) -> None:
        """However much of it is written; then all of it is."""
        storage, other = make_storage(), make_storage()
        data = pattern(BLOCK + 1)
        with contextlib.closing(storage.create(SHARD, len(data))) as writer:
            assert _visible(other) == []
            write_blocks(storage, writer, data)
            assert _visible(other) == []
            with pytest.raises(FileNotFoundError):
                other.size(SHARD)
            writer.publish()
            assert _visible(other) == [SHARD]
            assert read_object(other, SHARD) == data
        assert everything(other) == [SHARD]
        assert read_object(other, SHARD) == data

    def test_what_is_closed_without_publish_never_was(self, make_storage: MakeStorage) -> None:
        """Nothing is left, not even a directory; and its name is free."""
        storage, other = make_storage(), make_storage()
        data = pattern(BLOCK + PAGE)
        for written in (0, 1, 2):
            writer = storage.create(SHARD, len(data))
            for block in blocks(data)[:written]:
                writer.write(*block)
            writer.close()
            writer.close()
            storage.delete_directory("step-00000001")
            assert everything(other) == []

        write_object(storage, SHARD, data)
        assert read_object(storage, SHARD) == data

    def test_closing_again_harms_nothing_that_was_published(self, storage: Storage) -> None:
        """Also if another object has the name by then."""
        writer = storage.create(SHARD, len(DATA))
        write_blocks(storage, writer, DATA)
        writer.publish()
        writer.close()
        writer.close()
        assert read_object(storage, SHARD) == DATA
        storage.delete(SHARD)
        write_object(storage, SHARD, b"another")
        writer.close()
        assert read_object(storage, SHARD) == b"another"

    def test_blocks_come_in_any_order_where_several_threads_write(self, storage: Storage) -> None:
        """The last one first, and all at once."""
        if storage.parallel_writes == 1:
            pytest.skip("this place takes blocks in order")
        data = pattern(2 * BLOCK + 100)
        with contextlib.closing(storage.create(SHARD, len(data))) as writer:
            for block in reversed(blocks(data)):
                writer.write(*block)
            writer.publish()
        assert read_object(storage, SHARD) == data

    def test_memory_may_be_used_again_when_write_returns(self, storage: Storage) -> None:
        """A block is copied or sent by then."""
        data = pattern(2 * BLOCK + 100)
        with contextlib.closing(storage.create(SHARD, len(data))) as writer:
            for offset, block in blocks(data):
                writer.write(offset, block)
                block[:] = bytes(len(block))
            writer.publish()
        assert read_object(storage, SHARD) == data

    def test_memory_need_not_be_aligned(self, storage: Storage) -> None:
        """Sources differ."""
        padded = DATA + bytes(-len(DATA) % PAGE)
        with contextlib.closing(storage.create(SHARD, len(DATA))) as writer:
            writer.write(0, memoryview(b"x" + padded)[1:])
            writer.publish()
        assert read_object(storage, SHARD) == DATA

    def test_two_objects_are_written_at_the_same_time(self, storage: Storage) -> None:
        """By one client; each gets its own bytes."""
        first, second = pattern(BLOCK + 5, 1), pattern(BLOCK + 5, 2)
        with (
            contextlib.closing(storage.create("step-00000001/a", len(first))) as one,
            contextlib.closing(storage.create("step-00000001/b", len(second))) as other,
        ):
            for block, another in zip(blocks(first), blocks(second), strict=True):
                one.write(*block)
                other.write(*another)
            other.publish()
            one.publish()
        assert read_object(storage, "step-00000001/a") == first
        assert read_object(storage, "step-00000001/b") == second

    def test_an_object_is_replaced_by_one_act(self, make_storage: MakeStorage) -> None:
        """Until the writer publishes it is the old one, then the new one; no other object is left."""
        storage, other, new = make_storage(), make_storage(), pattern(len(DATA), 7)
        write_object(storage, SHARD, DATA)
        with contextlib.closing(storage.create(SHARD, len(new))) as writer:
            write_blocks(storage, writer, new)
            assert read_object(other, SHARD) == DATA
            writer.publish()
            assert read_object(other, SHARD) == new
        assert read_object(other, SHARD) == new
        assert everything(storage) == [SHARD]

    def test_a_writer_that_gives_up_leaves_what_is_there(self, make_storage: MakeStorage) -> None:
        """The object of another one under the same name."""
        storage = make_storage()
        with contextlib.closing(storage.create(SHARD, len(DATA))) as writer:
            write_blocks(storage, writer, pattern(len(DATA), 7))
            write_object(make_storage(), SHARD, DATA)
        assert read_object(storage, SHARD) == DATA
        assert everything(storage) == [SHARD]

    def test_many_writers_of_the_same_object_all_succeed(self, make_storage: MakeStorage) -> None:
        """Threads of several clients, with the same bytes: they are whole, and nothing else is left."""
        clients = [make_storage() for _ in range(3)]
        start = threading.Barrier(6)

        def write(number: int) -> None:
            start.wait(WAIT_S)
            write_object(clients[number % 3], SHARD, DATA)

        assert at_once(*[lambda number=number: write(number) for number in range(6)]) == [None] * 6
        assert read_object(clients[0], SHARD) == DATA
        assert everything(clients[1]) == [SHARD]

    def test_the_name_of_a_writer_that_was_killed_is_free(
        self, make_storage: MakeStorage, elsewhere: str | None
    ) -> None:
        """What it wrote is not visible, and in nobody's way."""
        code = f"""
data = pattern({BLOCK + PAGE})
writer = storage.create({SHARD!r}, len(data))
write_blocks(storage, writer, data)
say("written")
wait()
"""
        storage = make_storage()
        with in_another_process(elsewhere, code) as child:
            assert child.next_line() == "written"
            assert _visible(storage) == []
            child.kill()
        assert _visible(storage) == []
        write_object(storage, SHARD, DATA)
        assert read_object(storage, SHARD) == DATA

    def test_what_a_living_writer_holds_is_not_abandoned(self, make_storage: MakeStorage) -> None:
        """Until it is closed, published or not, whoever asks."""
        storage, other = make_storage(), make_storage()
        with contextlib.closing(storage.create(SHARD, len(DATA))) as writer:
            write_blocks(storage, writer, DATA)
            for path in everything(other):
                assert not path.endswith("/")
                assert not other.delete_abandoned(path)
            assert other.abort_stale() == []
            writer.publish()
            assert not storage.delete_abandoned(SHARD, unless=MANIFEST)
            assert not other.delete_abandoned(SHARD, unless=MANIFEST)
            assert read_object(other, SHARD) == DATA
        assert read_object(other, SHARD) == DATA

    def test_what_is_committed_is_not_abandoned(self, make_storage: MakeStorage) -> None:
        """``unless`` is there: nothing goes, however old it is."""
        storage = make_storage()
        write_object(storage, SHARD, DATA)
        storage.put(MANIFEST, b"manifest")
        assert not make_storage().delete_abandoned(SHARD, unless=MANIFEST)
        assert everything(storage) == [MANIFEST, SHARD]

    def test_what_nobody_holds_is_abandoned_or_stays_in_doubt(self, make_storage: MakeStorage) -> None:
        """What is said is true. Where death is noticed at once, it goes."""
        storage = make_storage()
        write_object(storage, SHARD, DATA)
        has_gone = make_storage().delete_abandoned(SHARD, unless=MANIFEST)
        assert (SHARD in everything(storage)) is not has_gone
        if self.notices_death:
            assert has_gone

    def test_what_a_killed_writer_left_can_be_removed(self, make_storage: MakeStorage, elsewhere: str | None) -> None:
        """Not before its death; after it, where that is noticed at once. Both of the object itself and of its parts."""
        code = f"""
data = pattern({5 * PAGE})
half = storage.create("step-00000002/half", len(data))
write_blocks(storage, half, data)
writer = storage.create({SHARD!r}, len(data))
write_blocks(storage, writer, data)
writer.publish()
say("published")
wait()
"""
        storage = make_storage()
        with in_another_process(elsewhere, code) as child:
            assert child.next_line() == "published"
            left = everything(storage)
            assert SHARD in left
            assert not any(storage.delete_abandoned(path, unless=MANIFEST) for path in left)
            assert everything(storage) == left
            child.kill()
        gone = [storage.delete_abandoned(path, unless=MANIFEST) for path in left]
        if self.notices_death:
            assert all(gone)
            assert not [path for path in everything(storage) if not path.endswith("/")]

    def test_a_reader_without_the_right_to_write_reads_all_the_same(
        self, make_storage: MakeStorage, read_only: Storage | None
    ) -> None:
        """What it may not do it is told."""
        if read_only is None:
            pytest.skip("no client of this place lacks the right to write")
        storage = make_storage()
        write_object(storage, SHARD, DATA)
        assert read_object(read_only, SHARD) == DATA
        assert read_only.list("step-00000001") == storage.list("step-00000001")
        with pytest.raises(LevelError):
            read_only.put(MANIFEST, b"manifest")
        with pytest.raises(LevelError):
            write_object(read_only, MANIFEST, DATA)
        with pytest.raises(LevelError):
            read_only.delete(SHARD)
        read_only.delete_directory("step-00000001")
        assert everything(storage) == [SHARD]
        assert read_object(storage, SHARD) == DATA
