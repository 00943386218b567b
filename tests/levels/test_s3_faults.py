"""S3 that breaks on the way: resets, refusals, stalls, lost answers, damaged bytes, dead servers, old credentials."""

import contextlib
import logging
import threading

import fault_proxy
import pytest
import seaweed
from s3_work import (
    MIB,
    SHARD,
    SIZE,
    abandoned_after,
    blocks,
    download,
    pattern,
    through,
    upload,
    uploads_at,
)
from support.names import directory_of

from lazysnap.errors import LevelError
from lazysnap.levels import s3
from lazysnap.levels.leftovers import sweep
from lazysnap.levels.s3 import S3Storage

pytestmark = pytest.mark.slow

DATA = pattern(SIZE)


@pytest.fixture
def impatient(monkeypatch):
    """A request is repeated for a second."""
    monkeypatch.setattr(s3, "PATIENCE_S", 1.0)


def quickly_refused(proxy, server, url) -> S3Storage:
    """A storage whose requests have a second."""
    return S3Storage(url, {**server.options(endpoint=proxy.endpoint), "config_kwargs": {"read_timeout": 1.0}})


def nothing_is_left(server, url) -> bool:
    return S3Storage(url, server.options()).list(directory_of(1)) == [] and uploads_at(server, url) == []


@pytest.mark.parametrize(
    ("operation", "act", "times"),
    [
        ("part", fault_proxy.reset(after_bytes=MIB), 2),
        ("part", fault_proxy.answer(503, "SlowDown"), 3),
        ("part", fault_proxy.reset_after(), 1),
        ("create", fault_proxy.answer(503, "SlowDown"), 1),
        ("complete", fault_proxy.answer(503, "SlowDown"), 2),
        ("complete", fault_proxy.reset_after(), 1),
        ("HEAD", fault_proxy.answer(503, "SlowDown"), 2),
    ],
    ids=lambda value: getattr(value, "__qualname__", value).split(".")[0] if callable(value) else value,
)
def test_what_passes_is_repeated_and_the_bytes_are_whole(s3_proxy, s3_server, s3_url, operation, act, times):
    storage = through(s3_proxy, s3_server, s3_url)
    rule = s3_proxy.rule(operation, act, times)
    upload(storage, DATA)
    s3_proxy.clear()

    assert rule.hits == times
    assert download(storage) == DATA
    assert storage.list(directory_of(1)) == ["node-00000-of-00001.safetensors"]


@pytest.mark.parametrize(
    ("operation", "act"),
    [("PUT", fault_proxy.reset_after()), ("GET", fault_proxy.reset()), ("DELETE", fault_proxy.answer(503, "SlowDown"))],
    ids=["put", "get", "delete"],
)
def test_what_is_small_is_repeated_too(s3_proxy, s3_server, s3_url, operation, act):
    storage = through(s3_proxy, s3_server, s3_url)
    rule = s3_proxy.rule(operation, act, 1)
    storage.put(SHARD, b"small")
    assert storage.get(SHARD) == b"small"
    storage.delete(SHARD)
    s3_proxy.clear()

    assert rule.hits == 1
    assert nothing_is_left(s3_server, s3_url)


def test_an_upload_whose_start_was_answered_into_the_void_is_swept(s3_proxy, s3_server, s3_url):
    storage = through(s3_proxy, s3_server, s3_url)
    s3_proxy.rule("create", fault_proxy.reset_after(), 1)
    upload(storage, DATA)

    assert download(storage) == DATA
    assert storage.abort_stale() == []  # nothing tells it from somebody's copy
    later = abandoned_after(0.0, S3Storage(s3_url, s3_server.options()))
    assert later.abort_stale() == [SHARD]
    assert download(storage) == DATA
    assert later.abort_stale() == []


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (
            fault_proxy.answer(503, "SlowDown"),
            r"bucket 'lazysnap' does not answer.*SlowDown",
        ),
        (fault_proxy.flip(), r"bytes arrived damaged at bucket 'lazysnap'; check the network"),
        (fault_proxy.answer(403, "AccessDenied"), r"access to bucket 'lazysnap' was refused; allow"),
    ],
    ids=["slow down", "flip", "refused"],
)
def test_what_lasts_is_given_up_for_this_snapshot_and_leaves_nothing(
    s3_proxy, s3_server, s3_url, impatient, act, expected
):
    storage = through(s3_proxy, s3_server, s3_url)
    s3_proxy.rule("part", act)
    with pytest.raises(LevelError, match=expected):
        upload(storage, DATA)
    s3_proxy.clear()

    assert nothing_is_left(s3_server, s3_url)
    upload(storage, DATA)
    assert download(storage) == DATA


@pytest.mark.parametrize("operation", ["part", "complete"])
def test_a_server_that_accepts_and_never_answers_is_given_up(s3_proxy, s3_server, s3_url, impatient, operation):
    storage = quickly_refused(s3_proxy, s3_server, s3_url)
    stall = fault_proxy.Stall()
    s3_proxy.rule(operation, stall)
    try:
        with pytest.raises(LevelError, match="does not answer"):
            upload(storage, DATA)
        assert stall.reached.is_set()
    finally:
        stall.released.set()
        s3_proxy.clear()
    patient = S3Storage(s3_url, s3_server.options())
    upload(patient, DATA)
    assert download(patient) == DATA


def test_a_peer_that_stops_reading_in_the_middle_of_a_part_is_given_up(s3_proxy, s3_server, s3_url, impatient):
    """The sockets' buffers are full by then."""
    storage = quickly_refused(s3_proxy, s3_server, s3_url)
    stall = fault_proxy.Stall()

    def act(handler) -> bool:
        handler.rfile.read(1000)
        return stall(handler)

    s3_proxy.rule("part", act)
    try:
        with pytest.raises(LevelError, match="does not answer"):
            upload(storage, DATA)
    finally:
        stall.released.set()


def test_a_full_bucket_says_so(s3_proxy, s3_server, s3_url):
    storage = through(s3_proxy, s3_server, s3_url)
    s3_proxy.rule("part", fault_proxy.answer(403, "QuotaExceeded"))
    with pytest.raises(LevelError, match="free space there or lower keep_last"):
        upload(storage, DATA)


# -------------------------------------------------------------------- a server that dies


def test_a_server_killed_in_mid_write_and_started_again_gets_the_rest(s3_server, s3_url):
    storage = S3Storage(s3_url, s3_server.options())
    data = blocks(DATA)
    with contextlib.closing(storage.create(SHARD, SIZE)) as writer:
        writer.write(*data[0])
        s3_server.kill()
        # Not the other way round: the server dies with the thread that starts it.
        rest = threading.Thread(target=writer.write, args=data[1])
        rest.start()
        s3_server.start()
        rest.join(60)
        writer.publish()

    assert download(storage) == DATA


def test_a_server_that_stays_dead_costs_this_snapshot_only(s3_server, s3_url, impatient, monkeypatch):
    storage = S3Storage(s3_url, s3_server.options())
    upload(storage, DATA)
    path = SHARD.replace("1/", "2/")
    with contextlib.closing(storage.create(path, SIZE)) as writer:
        writer.write(*blocks(DATA)[0])
        s3_server.kill()
        try:
            writer.write(*blocks(DATA)[1])
            with pytest.raises(LevelError, match="does not answer"):
                writer.publish()
            writer.close()
        finally:
            s3_server.start()

    # For a moment behind its start it answers 500.
    monkeypatch.setattr(s3, "PATIENCE_S", 60.0)
    later = abandoned_after(0.0, S3Storage(s3_url, s3_server.options()))
    assert download(later) == DATA
    with pytest.raises(FileNotFoundError):
        later.size(path)
    later.abort_stale()
    assert uploads_at(s3_server, s3_url) == []
    upload(later, DATA, path)
    assert download(later, path) == DATA


# -------------------------------------------------------------------- credentials


def test_credentials_that_expire_in_the_middle_cost_this_snapshot_and_are_read_again(
    s3_proxy, s3_server, s3_url, tmp_path, monkeypatch, caplog
):
    """From the credentials file, which somebody renews between two snapshots."""
    caplog.set_level(logging.DEBUG, "lazysnap")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    def give(key: str) -> None:
        secret = s3_server.options(key)["secret"]
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")

    give(seaweed.WRITER)
    storage = S3Storage(s3_url, {"endpoint_url": s3_proxy.endpoint})
    assert storage.checks_writes()
    data = blocks(DATA)
    with contextlib.closing(storage.create(SHARD, SIZE)) as writer:
        writer.write(*data[0])
        s3_proxy.rule(lambda request: request.access_key == seaweed.WRITER, fault_proxy.answer(400, "ExpiredToken"))
        writer.write(*data[1])
        with pytest.raises(LevelError, match="credentials for bucket 'lazysnap' have expired; renew") as caught:
            writer.publish()
    with pytest.raises(LevelError):
        storage.size(SHARD)  # HEAD, whose refusal has no body
    give(seaweed.SECOND)
    storage.abort_stale()
    upload(storage, DATA)

    assert download(storage) == DATA
    assert "writer-secret" not in caplog.text + str(caught.value)


# -------------------------------------------------------------------- reading


@pytest.mark.parametrize("is_reset", [True, False], ids=["reset", "end"])
def test_a_download_that_breaks_goes_on_where_it_was(s3_proxy, s3_server, s3_url, is_reset):
    storage = through(s3_proxy, s3_server, s3_url)
    upload(storage, DATA)
    rule = s3_proxy.rule("GET", fault_proxy.cut_answer(MIB, is_reset=is_reset), 3)

    assert download(storage) == DATA
    assert rule.hits == 3


def test_a_download_that_breaks_for_ever_is_given_up(s3_proxy, s3_server, s3_url, impatient):
    storage = through(s3_proxy, s3_server, s3_url)
    upload(storage, DATA)
    s3_proxy.rule("GET", fault_proxy.cut_answer(after_bytes=0))
    with pytest.raises(LevelError, match="does not answer"):
        download(storage)


# -------------------------------------------------------------------- servers that can less


def nothing_but_the_shard(storage) -> bool:
    return storage.list(directory_of(1)) == ["node-00000-of-00001.safetensors"] and storage.list() == [directory_of(1)]


@pytest.mark.parametrize(
    ("lacks", "compares"), [((), True), (("x-amz-checksum-crc64nvme",), False)], ids=["nothing", "checksums"]
)
def test_a_server_that_does_not_compare_checksums_is_found_out(s3_proxy, s3_server, s3_url, lacks, compares, caplog):
    s3_proxy.rule("*", fault_proxy.without("nothing", *lacks))
    storage = S3Storage(s3_url, s3_server.options(endpoint=s3_proxy.endpoint))
    # Also before the first write: whoever only deletes old snapshots must know which of them count.
    assert storage.checks_writes() is compares
    upload(storage, DATA)

    assert ("does not notice damaged parts" in caplog.text) is not compares
    assert download(storage) == DATA
    assert nothing_but_the_shard(storage)


def test_a_right_that_is_lacking_does_not_stop_the_sweep(s3_proxy, s3_server, s3_url, caplog):
    storage = abandoned_after(0.0, through(s3_proxy, s3_server, s3_url))
    storage.put(SHARD, b"left by the dead")
    s3_proxy.rule("uploads", fault_proxy.answer(403, "AccessDenied"))

    assert sweep(storage) == [SHARD]
    assert "unfinished uploads are not aborted; let a lifecycle rule do it" in caplog.text
    assert "access to bucket 'lazysnap' was refused" in caplog.text
