"""What a storage must do with objects that are whole: small ones, ranges, names, directories, deletion."""

import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.place import (
    BLOCK,
    PAGE,
    WAIT_S,
    MakeStorage,
    Place,
    everything,
    pattern,
    read_object,
    read_range,
    write_object,
)

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.storage import Storage

NAMES = (
    "step-00000000/node-00000-of-00001.safetensors",
    "step-00001000-0199f3a2b4c51d2e-0199f3a2b4d7ff01/node-00003-of-00008.json",
    "step-123456789012/node-00000-of-00001.json",
    "step-00000002/keep-before-anneal",
    "step-00000002/keep-Epoch_3.v2-final..x",
    "step-00000002/keep-" + "n" * 64,
)
"""All kinds of names that lazysnap gives."""
SIZES = (0, 1, PAGE - 1, PAGE, PAGE + 1, 300_000)
EDGE_SIZES = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + PAGE + 1)
RANGES = (
    (0, PAGE),
    (PAGE, 2 * PAGE),
    (0, 1),
    (1, PAGE),
    (PAGE - 1, 2),
    (PAGE, PAGE + 1),
    (3 * PAGE, 1234),
    (3 * PAGE + 1233, 1),
    (0, 3 * PAGE + 1234),
)
"""Offsets and lengths."""


class ObjectContract(Place):
    """Small objects, reads, names, directories, deletion."""

    def limit_small(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> int | None:
        """Lower the bound above which ``get`` refuses, for the test of it; the bound, or ``None`` to skip that test.

        Sets ``MAX_SMALL_BYTES`` in the module of the storage's class, if it has that name; override it where not.
        """
        module = sys.modules[type(storage).__module__]
        if not hasattr(module, "MAX_SMALL_BYTES"):
            return None
        monkeypatch.setattr(module, "MAX_SMALL_BYTES", 10_000)
        return 10_000

    def test_it_says_what_it_is(self, storage: Storage) -> None:
        """``url``, ``parallel_writes`` and ``parallel_reads`` are there, and ``checks_writes`` answers."""
        assert isinstance(storage.url, str)
        assert storage.url
        assert storage.parallel_writes >= 1
        assert storage.parallel_reads >= 1
        assert storage.checks_writes() in (True, False)

    def test_looking_at_an_empty_place_finds_nothing_and_makes_nothing(
        self, storage: Storage, make_storage: MakeStorage
    ) -> None:
        """A place that was never written to is no error."""
        assert storage.list() == []
        assert storage.list("step-00000001") == []
        storage.delete("step-00000001/object")
        storage.delete_directory("step-00000001")
        assert not storage.delete_abandoned("step-00000001/object")
        assert storage.abort_stale() == []
        assert make_storage().list() == []

    @pytest.mark.parametrize("is_there_before", [False, True])
    def test_a_linked_object_lives_by_itself(self, make_storage: MakeStorage, is_there_before: bool) -> None:
        """Where a place can link: in another directory, also over an object, and when the first one is deleted."""
        storage, data = make_storage(), pattern(300_000)
        write_object(storage, "step-00000001/object", data)
        if is_there_before:
            write_object(storage, "step-00000002/object", b"something else")
        if not storage.link("step-00000001/object", "step-00000002/object"):
            assert read_object(storage, "step-00000001/object") == data
            return
        assert storage.link("step-00000001/object", "step-00000002/object"), "it is that already"

        write_object(storage, "step-00000001/object", b"another one")
        storage.delete("step-00000001/object")
        storage.delete_directory("step-00000001")

        other = make_storage()
        assert read_object(other, "step-00000002/object") == data
        assert everything(other) == ["step-00000002/object"]

    def test_nothing_is_linked_from_nowhere(self, storage: Storage) -> None:
        """Neither is a directory made."""
        assert not storage.link("step-00000001/object", "step-00000002/object")
        storage.put("step-00000003/object", b"small")
        assert not storage.link("step-00000003/other", "step-00000003/target")
        assert everything(storage) == ["step-00000003/object"]

    def test_a_small_object_is_there_on_return(self, make_storage: MakeStorage) -> None:
        """With the right bytes, for another client as well, and by every way to read."""
        storage, other = make_storage(), make_storage()
        for size in SIZES:
            data, path = pattern(size), f"step-00000001/object-{size}"
            storage.put(path, data)
            assert other.get(path) == data
            assert other.size(path) == size
            assert read_object(other, path) == data
        assert other.list() == ["step-00000001"]
        assert sorted(other.list("step-00000001")) == sorted(f"object-{size}" for size in SIZES)

    def test_a_written_object_is_there_after_publish(self, make_storage: MakeStorage) -> None:
        """The padding of its last block is cut off."""
        self._write_and_read(make_storage, SIZES)

    @pytest.mark.parametrize("size", EDGE_SIZES)
    def test_a_large_object_is_there_after_publish(self, make_storage: MakeStorage, size: int) -> None:
        """The padding of its last block is cut off."""
        self._write_and_read(make_storage, [size])

    def _write_and_read(self, make_storage: MakeStorage, sizes: Sequence[int]) -> None:
        storage, other = make_storage(), make_storage()
        for size in sizes:
            data, path = pattern(size), f"step-00000001/object-{size}"
            write_object(storage, path, data)
            assert other.size(path) == size
            assert read_object(other, path) == data
        assert sorted(other.list("step-00000001")) == sorted(f"object-{size}" for size in sizes)

    def test_a_small_object_can_be_put_again(self, storage: Storage) -> None:
        """Without ``exclusive`` the last one stands, whole, longer or shorter."""
        for size in (5000, 100, 9000):
            storage.put("step-00000001/object", pattern(size))
            assert storage.get("step-00000001/object") == pattern(size)
        assert storage.list("step-00000001") == ["object"]

    def test_names_stay_as_they_are_given(self, storage: Storage) -> None:
        """For both kinds of writes."""
        for name in NAMES:
            directory, file = name.split("/")
            storage.put(name, b"small")
            write_object(storage, f"{directory}/other", b"written")

            assert directory in storage.list()
            assert sorted(storage.list(directory)) == sorted(["other", file])
            assert storage.get(name) == b"small"
            storage.delete(name)
            assert storage.list(directory) == ["other"]
        assert sorted(storage.list()) == sorted({name.split("/")[0] for name in NAMES})

    def test_many_objects_in_many_directories_are_all_listed(self, storage: Storage) -> None:
        """Listings are complete, and of one directory only."""
        names = {f"step-{step:08d}": [f"keep-{number}" for number in range(step)] for step in (1, 2, 20)}
        paths = [f"{directory}/{name}" for directory, children in names.items() for name in children]
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(storage.put, path, path.encode()) for path in paths]:
                future.result(WAIT_S)

        assert sorted(storage.list()) == sorted(names)
        for directory, children in names.items():
            assert sorted(storage.list(directory)) == sorted(children)
        assert all(storage.get(path) == path.encode() for path in paths)

    def test_a_directory_whose_name_begins_like_another_is_another(self, storage: Storage) -> None:
        """As the snapshots of one step of two runs."""
        storage.put("step-00000001-other/object", b"other")
        assert storage.list("step-00000001") == []
        storage.put("step-00000001/object", b"own")

        assert storage.list("step-00000001") == ["object"]
        storage.delete("step-00000001/object")
        storage.delete_directory("step-00000001")
        assert everything(storage) == ["step-00000001-other/object"]

    def test_what_is_not_there_is_a_file_not_found(self, storage: Storage) -> None:
        """However it is asked for, and whether or not its directory is there."""
        storage.put("step-00000001/object", b"x")
        for path in ("step-00000001/none", "step-00000002/none", "none"):
            with pytest.raises(FileNotFoundError):
                storage.get(path)
            with pytest.raises(FileNotFoundError):
                storage.size(path)
            with pytest.raises(FileNotFoundError):
                read_range(storage, path, 0, map_anonymous(1))

    def test_the_stamp_of_what_is_not_there_is_none_or_a_file_not_found(self, storage: Storage) -> None:
        """A place without stamps need not look."""
        with contextlib.suppress(FileNotFoundError):
            assert storage.stamp("step-00000001/none") is None

    def test_an_object_that_is_too_large_to_be_read_whole_is_refused(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Up to the bound it is read."""
        limit = self.limit_small(storage, monkeypatch)
        if limit is None:
            pytest.skip("the bound of this storage cannot be lowered: override limit_small")
        write_object(storage, "step-00000001/fits", pattern(limit))
        write_object(storage, "step-00000001/large", pattern(limit + 1))

        assert storage.get("step-00000001/fits") == pattern(limit)
        with pytest.raises(FormatError):
            storage.get("step-00000001/large")

    def test_a_range_is_read_wherever_it_lies(self, storage: Storage) -> None:
        """Aligned or not, into memory aligned or not, and nothing beside it is touched."""
        data = pattern(3 * PAGE + 1234)
        storage.put("step-00000001/object", data)
        for offset, length in RANGES:
            for shift in (0, 1):
                room = map_anonymous(length + 2 * PAGE)
                with contextlib.closing(storage.reader("step-00000001/object")) as reader:
                    reader.read_into(offset, room[shift : shift + length])
                assert room == bytes(shift) + data[offset : offset + length] + bytes(len(room) - length - shift)

    def test_a_read_beyond_the_end_is_a_corrupt_shard(self, storage: Storage) -> None:
        """Whether it begins before the end or behind it."""
        storage.put("step-00000001/empty", b"")
        storage.put("step-00000001/object", pattern(100))
        for name, offset, length in (("empty", 0, 1), ("object", 0, 101), ("object", 100, 1), ("object", 5000, 10)):
            with (
                contextlib.closing(storage.reader(f"step-00000001/{name}")) as reader,
                pytest.raises(FormatError),
            ):
                reader.read_into(offset, map_anonymous(length))

    def test_nothing_can_be_read_of_an_empty_object(self, storage: Storage) -> None:
        """Which is no error."""
        storage.put("step-00000001/object", b"")
        assert storage.get("step-00000001/object") == b""
        assert read_object(storage, "step-00000001/object") == b""
        read_range(storage, "step-00000001/object", 0, map_anonymous(0))

    def test_one_reader_serves_several_threads(self, storage: Storage) -> None:
        """Each gets the range that it asked for."""
        data = pattern(64 * PAGE + 5)
        storage.put("step-00000001/object", data)
        spans = [(start * 7919 % (60 * PAGE), 1 + start * 613 % (4 * PAGE)) for start in range(60)]
        with (
            contextlib.closing(storage.reader("step-00000001/object")) as reader,
            ThreadPoolExecutor(4) as pool,
        ):

            def one(offset: int, length: int) -> bool:
                out = map_anonymous(length)
                reader.read_into(offset, out)
                return out == data[offset : offset + length]

            assert all(pool.map(one, *zip(*spans, strict=True)))

    def test_a_reader_may_be_closed_twice(self, storage: Storage) -> None:
        """It does not close another reader, which may have its descriptor by then."""
        storage.put("step-00000001/object", b"x")
        reader = storage.reader("step-00000001/object")
        reader.close()
        with contextlib.closing(storage.reader("step-00000001/object")) as other:
            reader.close()
            out = map_anonymous(1)
            other.read_into(0, out)
        assert bytes(out) == b"x"

    def test_an_object_deleted_while_it_is_read_gives_its_own_bytes_or_none(self, make_storage: MakeStorage) -> None:
        """Never those of the next one of that name, half and half."""
        storage, old, new = make_storage(), pattern(2 * PAGE, 1), pattern(2 * PAGE, 2)
        storage.put("step-00000001/object", old)
        out = map_anonymous(PAGE)
        with contextlib.closing(storage.reader("step-00000001/object")) as reader:
            reader.read_into(0, out)
            assert out == old[:PAGE]
            make_storage().delete("step-00000001/object")
            try:
                reader.read_into(PAGE, out)
            except (FileNotFoundError, LevelError, FormatError):
                pass
            else:
                assert out == old[PAGE:]
        storage.put("step-00000001/object", new)
        assert storage.get("step-00000001/object") == new

    def test_the_stamp_changes_with_the_object(self, storage: Storage) -> None:
        """Also if the new one has the same size; and stays as long as the object does."""
        storage.put("step-00000001/object", b"one")
        first = storage.stamp("step-00000001/object")
        if first is None:
            pytest.skip("this place has no stamps")
        assert storage.stamp("step-00000001/object") == first
        storage.put("step-00000001/object", b"two")
        assert storage.stamp("step-00000001/object") != first

    def test_what_was_just_put_is_not_settled(self, storage: Storage) -> None:
        """Nor is what is not there: a sweep takes neither for garbage. And it is no symbolic link."""
        storage.put("step-00000001/object", b"x")
        assert not storage.is_stale("step-00000001/object")
        with contextlib.suppress(FileNotFoundError):
            assert not storage.is_stale("step-00000001/none")
        for path in ("step-00000001", "step-00000001/object", "step-00000002/none"):
            assert not storage.is_link(path)

    def test_deleting_is_for_everyone_and_can_be_repeated(self, make_storage: MakeStorage) -> None:
        """What is gone is gone for another client, and what was never there is no error."""
        storage, other = make_storage(), make_storage()
        storage.put("step-00000001/object", b"x")
        storage.put("step-00000001/stays", b"y")
        assert other.get("step-00000001/object") == b"x"
        storage.delete("step-00000001/object")
        storage.delete("step-00000001/object")
        other.delete("step-00000001/object")
        other.delete("step-00000002/none")

        assert other.list("step-00000001") == ["stays"]
        with pytest.raises(FileNotFoundError):
            other.get("step-00000001/object")

    def test_a_directory_goes_only_when_it_is_empty(self, make_storage: MakeStorage) -> None:
        """And never with an error."""
        storage = make_storage()
        storage.put("step-00000001/object", b"x")
        storage.delete_directory("step-00000001")
        assert storage.get("step-00000001/object") == b"x"
        storage.delete("step-00000001/object")
        storage.delete_directory("step-00000001")
        storage.delete_directory("step-00000001")

        assert storage.list() == []
        assert make_storage().list() == []
        storage.put("step-00000001/object", b"again")
        assert make_storage().get("step-00000001/object") == b"again"

    def test_two_places_know_nothing_of_each_other(self, make_storage: MakeStorage) -> None:
        """Two runs may lie side by side."""
        one, other = make_storage("run"), make_storage("run-2")
        one.put("step-00000001/object", b"one")
        other.put("step-00000001/object", b"other")
        one.delete("step-00000001/object")
        one.delete_directory("step-00000001")

        assert one.list() == []
        assert other.get("step-00000001/object") == b"other"
