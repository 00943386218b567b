"""Places behind fsspec URLs, whatever their drivers can do."""

import contextlib
import gc
import logging
import os
import traceback
import uuid

import fsspec
import pytest
from drivers import DRIVERS, ObjectStore, Talkative
from fsspec.implementations.memory import MemoryFileSystem
from s3_work import SHARD, SIZE, abandoned_after, blocks, download, pattern, upload
from support.names import directory_of

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.fsspec_storage import FsspecStorage
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.redaction import Redaction

NAME = SHARD.split("/")[1]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    for driver in DRIVERS:
        for place in ("objects", "store"):
            getattr(driver, place, {}).clear()
    ObjectStore.discarded.clear()
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def place():
    return uuid.uuid4().hex


@pytest.fixture(params=["memory", "objects", "nocreate", "ignorescreate", "notimes", "looksfirst"])
def storage(request, place):
    return FsspecStorage(f"{request.param}://{place}/run")


def hidden(storage) -> list[str]:
    return [name for name in storage.list(directory_of(1)) if not name.startswith(".")]


def test_a_manifest_that_cannot_be_looked_at_is_not_taken_for_missing(place, a_day_later):
    storage = FsspecStorage(f"losessight://{place}/run")
    upload(storage, pattern(SIZE))
    manifest = f"{SHARD}.json"
    storage._filesystem().pipe_file(storage._path(manifest), b"{}")
    assert not fsspec.filesystem("losessight").exists(f"/{place}/run/{manifest}")

    with pytest.raises(LevelError, match="no answer"):
        storage.delete_abandoned(SHARD, unless=manifest)

    assert hidden(storage) == [NAME, f"{NAME}.json"]


def test_a_small_object_that_arrives_by_half_is_not_there_under_its_name(place, monkeypatch):
    """As over sftp, where a file is visible before it is closed: half a manifest would look like a commit."""
    storage = FsspecStorage(f"memory://{place}/run")
    assert storage.abilities().shows_open_files
    whole = MemoryFileSystem.pipe_file

    def lost_by_half(self, path, value, **options):
        whole(self, path, value[: len(value) // 2], **options)
        raise OSError("the connection is lost")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lost_by_half)
    with pytest.raises(LevelError, match="the connection is lost"):
        storage.put(f"{SHARD}.json", b"{}")

    assert not storage.exists(f"{SHARD}.json")
    monkeypatch.undo()
    storage.put(f"{SHARD}.json", b"{}")
    assert storage.get(f"{SHARD}.json") == b"{}"


@pytest.mark.slow
def test_what_was_written_is_read_back_bit_for_bit(storage):
    data = pattern(SIZE)
    upload(storage, data)

    assert download(storage) == data
    assert storage.list(directory_of(1)) == [NAME]
    assert storage.list() == [directory_of(1)]


@pytest.mark.slow
def test_bytes_are_sent_as_they_come_and_nothing_shows_before_the_end(storage):
    data = pattern(SIZE)
    with contextlib.closing(storage.create(SHARD, SIZE)) as writer:
        for offset, block in blocks(data):
            writer.write(offset, block)
            assert hidden(storage) == []
        writer.publish()
        assert hidden(storage) == [NAME]


@pytest.mark.slow
def test_what_is_given_up_never_shows_also_when_the_driver_cleans_up_after_itself(storage):
    """A buffered file of fsspec publishes what it has when it is collected."""
    writer = storage.create(SHARD, SIZE)
    writer.write(*blocks(pattern(SIZE))[0])
    writer.close()
    del writer
    gc.collect()

    assert storage.list(directory_of(1)) == []
    upload(storage, pattern(100))
    assert download(storage) == pattern(100)


def test_a_driver_is_asked_to_discard_its_upload(place):
    storage = FsspecStorage(f"objects://{place}/run")
    storage.create(SHARD, SIZE).close()
    assert any(path.endswith(SHARD) for path in ObjectStore.discarded)


@pytest.mark.slow
def test_blocks_that_come_out_of_order_are_refused(storage):
    with contextlib.closing(storage.create(SHARD, SIZE)) as writer, pytest.raises(ValueError, match="expected at 0"):
        writer.write(*blocks(pattern(SIZE))[1])


@pytest.mark.slow
def test_what_was_not_written_whole_is_not_published(storage):
    with contextlib.closing(storage.create(SHARD, SIZE)) as writer:
        writer.write(*blocks(pattern(SIZE))[0])
        with pytest.raises(FormatError, match="were written of"):
            writer.publish()
    assert storage.list(directory_of(1)) == []


def test_a_place_that_loses_bytes_is_found_out(place):
    storage = FsspecStorage(f"losesbytes://{place}/run")
    with pytest.raises(LevelError, match="5999 bytes arrived, 6000 were sent"):
        upload(storage, pattern(6000))
    assert storage.list(directory_of(1)) == []


def test_a_file_whose_size_cannot_be_asked_for_is_not_published(place):
    storage = FsspecStorage(f"losessize://{place}/run")
    with pytest.raises(LevelError, match="no answer"):
        upload(storage, pattern(6000))
    assert storage.list(directory_of(1)) == []


def test_an_object_that_is_written_again_is_never_missing(place, monkeypatch):
    """A name that is given again, for example: without it retention deletes the snapshot."""
    storage = FsspecStorage(f"memory://{place}/run")
    path = f"{directory_of(1)}/keep-best"
    storage.put(path, b"old")
    rm_file = MemoryFileSystem.rm_file

    def rm_temporary_file(self, path):
        assert "tmp-" in path
        rm_file(self, path)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", rm_temporary_file)
    storage.put(path, b"new")

    assert storage.get(path) == b"new"


@pytest.mark.parametrize("protocol", ["keeps", "keepsinsilence"])
def test_an_object_is_replaced_also_where_a_file_is_not_renamed_to_a_name_that_exists(place, protocol):
    storage = FsspecStorage(f"{protocol}://{place}/run")
    path = f"{directory_of(1)}/keep-best"
    storage.put(path, b"old")
    storage.put(path, b"new")

    assert storage.get(path) == b"new"
    assert storage.list(directory_of(1)) == ["keep-best"]


@pytest.mark.parametrize(
    ("protocol", "shows_open_files"), [("memory", True), ("objects", False), ("nocreate", False), ("looksfirst", True)]
)
def test_what_a_place_can_do_is_tried_out(place, protocol, shows_open_files):
    storage = FsspecStorage(f"{protocol}://{place}/run")
    assert storage.abilities().shows_open_files is shows_open_files
    assert storage.list() == []


def test_where_nothing_has_an_age_nothing_is_abandoned(place):
    storage = abandoned_after(0.0, FsspecStorage(f"notimes://{place}/run"))
    storage.put(SHARD, b"x")

    assert not storage.delete_abandoned(SHARD)
    assert not storage.is_stale(SHARD)


@pytest.mark.parametrize("ahead_s", [0.0, 7200.0, -7200.0], ids=["right", "ahead", "behind"])
def test_age_is_by_the_clock_of_the_place(place, ahead_s, monkeypatch):
    monkeypatch.setattr(ObjectStore, "clock_s", ahead_s)
    storage = FsspecStorage(f"objects://{place}/run")
    path = f"{directory_of(1)}/object"
    storage.put(path, b"x")

    assert not abandoned_after(60.0, storage).delete_abandoned(path)
    assert abandoned_after(-60.0, storage).delete_abandoned(path)


def test_a_probe_of_a_dead_process_is_swept_when_it_is_old(place):
    storage = FsspecStorage(f"objects://{place}/run")
    storage.put(".lazysnap-probe-0123456789abcdef", b"probe")
    assert sweep(storage, None) == []
    late = abandoned_after(0.0, FsspecStorage(f"objects://{place}/run"))
    assert sweep(late, None) == [".lazysnap-probe-0123456789abcdef"]
    assert late.list() == []


# -------------------------------------------------------------------- secrets


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_a_secret_that_a_driver_quotes_is_in_no_message(place, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    password = uuid.uuid4().hex  # tracebacks quote this file
    storage = FsspecStorage(f"talkative://{place}/run", {"password": password})
    monkeypatch.setattr(Talkative, "is_broken", True)
    with pytest.raises(LevelError) as first:
        storage.list()
    with pytest.raises(LevelError) as second:
        storage.put(f"{directory_of(1)}/object", b"x")
    with pytest.raises(LevelError) as third:
        FsspecStorage("talkative://host/run", {"password": password, "no-such-option": 1})

    everything = caplog.text + repr(storage) + "".join(shown(caught.value) for caught in (first, second, third))
    assert password not in everything
    assert "password *** is not accepted" in str(first.value)
    assert "unknown options" in str(third.value)


def test_secrets_are_found_however_deep_and_short_words_are_left_alone():
    redaction = Redaction(
        {
            "client_kwargs": {"aws_secret_access_key": "abcdef"},
            "endpoint": "https://plain",
            "tokens": ["one-token"],
            "key": "ab",
        },
    )
    text = redaction.clean("abcdef one-token https://plain ab")

    assert text == "*** *** https://plain ab"


# -------------------------------------------------------------------- the process


def test_a_client_made_before_a_fork_makes_a_driver_of_its_own(place):
    storage = FsspecStorage(f"objects://{place}/run")
    mine = storage._filesystem()
    assert storage._filesystem() is mine
    pid = os.fork()
    if pid == 0:
        os._exit(0 if storage._filesystem() is not mine else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_drivers_are_not_shared_with_the_rest_of_the_program(place):
    """Whose options, sessions and listings are its own affair."""
    assert FsspecStorage(f"memory://{place}")._filesystem() is not fsspec.filesystem("memory")
