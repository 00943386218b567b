"""Snapshots in S3: a real server, real deaths, real races. What breaks on the way is in test_s3_faults.py."""

import contextlib
import logging
import shutil
import ssl
import subprocess
import sys
import traceback
import uuid

import fsspec
import pytest
import seaweed
from s3_work import (
    MIB,
    SHARD,
    SIZE,
    abandoned_after,
    begin_upload,
    blocks,
    child,
    download,
    next_line,
    operations,
    pattern,
    through,
    upload,
    uploads_at,
)
from support.names import directory_of
from support.place import read_range

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels import fsspec_storage, s3
from lazysnap.levels.fsspec_storage import MAX_PARTS, part_bytes
from lazysnap.levels.s3 import S3Storage
from lazysnap.levels.store import open_storage
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.shard.checksum import BLOCK_BYTES

pytestmark = pytest.mark.slow


@pytest.fixture
def storage(s3_server, s3_url):
    return S3Storage(s3_url, s3_server.options())


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_store_at_an_s3_url_is_this_one(s3_server, s3_url, scheme):
    storage = open_storage(s3_url.replace("s3:", f"{scheme}:"), options=s3_server.options())

    assert isinstance(storage, S3Storage)
    assert storage.checks_writes()
    upload(storage, pattern(100))
    assert S3Storage(s3_url, s3_server.options()).size(SHARD) == 100


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_an_object_of_a_block_or_more_is_sent_in_parts(s3_proxy, s3_server, s3_url, size):
    storage = through(s3_proxy, s3_server, s3_url)
    data = pattern(size)
    upload(storage, data)

    assert download(storage) == data
    assert operations(s3_proxy).count("part") == (-(-size // BLOCK_BYTES) if size >= BLOCK_BYTES else 0)


def test_the_server_copies_an_object_in_parts_of_which_each_is_progress(storage, monkeypatch):
    monkeypatch.setattr(s3, "COPIED_PART_BYTES", 5 * MIB)
    data = pattern(12 * MIB)
    upload(storage, data)
    copied = []

    assert storage.link(SHARD, f"{SHARD}2", lambda: copied.append(1))
    assert bytes(storage._call("reading", "cat_file", storage._path(f"{SHARD}2"))) == data
    assert len(copied) == 3


def test_a_copy_that_is_given_up_leaves_nothing(s3_server, storage, monkeypatch):
    monkeypatch.setattr(s3, "COPIED_PART_BYTES", 5 * MIB)
    upload(storage, pattern(12 * MIB))

    def give_up():
        raise CaptureAborted("given up")

    with pytest.raises(CaptureAborted, match="given up"):
        storage.link(SHARD, f"{SHARD}2", give_up)
    assert not storage.exists(f"{SHARD}2")
    assert uploads_at(s3_server, storage.url) == []


def test_an_object_of_too_many_blocks_is_sent_in_larger_parts(s3_proxy, s3_server, s3_url, monkeypatch):
    storage = through(s3_proxy, s3_server, s3_url)
    monkeypatch.setattr(fsspec_storage, "MAX_PARTS", 2)
    data = pattern(2 * BLOCK_BYTES + 1)
    upload(storage, data)

    assert operations(s3_proxy).count("part") == 2
    assert download(storage) == data


def test_the_largest_objects_get_along_with_the_number_of_parts():
    for size in (1, 10**9, MAX_PARTS * BLOCK_BYTES, MAX_PARTS * BLOCK_BYTES + 1, 5 * 10**12):
        part = part_bytes(size)
        assert part % BLOCK_BYTES == 0
        assert -(-size // part) <= MAX_PARTS
        assert part == BLOCK_BYTES or -(-size // (part - BLOCK_BYTES)) > MAX_PARTS


def test_blocks_of_any_size_are_put_together(storage):
    data = pattern(12 * MIB)
    with contextlib.closing(storage.create(SHARD, len(data))) as writer:
        for offset in range(0, len(data), 1_000_000):
            writer.write(offset, data[offset : offset + 1_000_000])
        writer.publish()

    assert download(storage) == data


def test_what_is_given_up_leaves_no_upload(storage, s3_server, s3_url):
    data = pattern(SIZE)
    with contextlib.closing(storage.create(SHARD, SIZE)) as writer:
        for offset, block in blocks(data)[:-1]:
            writer.write(offset, block)
        with pytest.raises(FormatError, match="were written of"):
            writer.publish()

    assert storage.list(directory_of(1)) == []
    assert uploads_at(s3_server, s3_url) == []


HALF = """
writer = storage.create(SHARD, SIZE)
data = pattern(SIZE)
writer.write(*blocks(data)[0])
say("half")
wait()
"""


def test_what_a_killed_writer_left_is_not_offered_and_aborted_after_a_day(storage, s3_server, s3_url):
    with child(s3_url, s3_server.options(), HALF) as writer:
        assert next_line(writer) == "half"
        assert storage.abort_stale() == []
        writer.kill()
        writer.wait(60)

    with pytest.raises(FileNotFoundError):
        storage.size(SHARD)
    assert uploads_at(s3_server, s3_url) == [SHARD]
    assert storage.abort_stale() == []
    assert abandoned_after(-1.0, S3Storage(s3_url, s3_server.options())).abort_stale() == [SHARD]
    assert uploads_at(s3_server, s3_url) == []
    assert storage.list(directory_of(1)) == []
    upload(storage, pattern(SIZE))
    assert download(storage) == pattern(SIZE)


def test_uploads_of_others_below_the_prefix_are_left_alone(storage, s3_server, s3_url):
    names = ("notes/big.bin", "big.bin", "step-1/deeper/big.bin", f"{directory_of(1)}/big.bin", f"notes/{SHARD}")
    for name in names:
        begin_upload(s3_server, s3_url, name)

    for client in (storage, abandoned_after(0.0, S3Storage(s3_url, s3_server.options()))):
        assert client.abort_stale() == []
    assert sorted(uploads_at(s3_server, s3_url)) == sorted(names)


def test_who_may_not_write_does_not_know_what_the_server_checks(s3_server, s3_url, monkeypatch):
    monkeypatch.setattr(s3, "_compares", {})

    assert not S3Storage(s3_url, s3_server.options(seaweed.READER)).checks_writes()


def test_whoever_sends_no_checksums_reads_back_at_a_server_that_would_compare_them(storage, s3_server, s3_url):
    """Also after another client of this process found out that the server compares them."""
    assert storage.checks_writes()
    options = {**s3_server.options(), "config_kwargs": {"request_checksum_calculation": "when_required"}}

    assert not S3Storage(s3_url, options).checks_writes()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_over_tls_a_server_must_be_who_it_says(s3_proxy, s3_server, s3_url, tmp_path, monkeypatch):
    paths = {name: str(tmp_path / name) for name in ("ca.key", "ca.pem", "key.pem", "certificate.pem")}
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    authority = [*new, "-subj", "/CN=test authority", "-keyout", paths["ca.key"], "-out", paths["ca.pem"]]
    server = [*new, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    server += ["-addext", "basicConstraints=critical,CA:FALSE", "-CA", paths["ca.pem"], "-CAkey", paths["ca.key"]]
    server += ["-keyout", paths["key.pem"], "-out", paths["certificate.pem"]]
    for command in (authority, server):
        subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(paths["certificate.pem"], paths["key.pem"])
    s3_proxy.socket = context.wrap_socket(s3_proxy.socket, server_side=True, do_handshake_on_connect=False)
    options = s3_server.options(endpoint=s3_proxy.endpoint.replace("http:", "https:"))
    known = S3Storage(s3_url, {**options, "client_kwargs": {**options["client_kwargs"], "verify": paths["ca.pem"]}})
    data = pattern(6 * MIB)
    upload(known, data)

    assert download(known) == data
    monkeypatch.setattr(s3, "PATIENCE_S", 0.1)
    with pytest.raises(LevelError, match="does not answer"):
        read_range(S3Storage(s3_url, options), SHARD, 0, memoryview(bytearray(10)))


@pytest.mark.parametrize(
    ("change", "url", "expected"),
    [
        ({}, "s3://no-such-bucket/run", "there is no bucket 'no-such-bucket'; create it"),
        ({"key": seaweed.READER, "secret": "reader-secret-3"}, None, "access to bucket 'lazysnap' was refused; allow"),
        ({"secret": "not-the-secret"}, None, "the credentials for bucket 'lazysnap' are wrong; correct key and secret"),
        ({"key": "nobody-knows-me"}, None, "the credentials for bucket 'lazysnap' are wrong; correct key and secret"),
    ],
    ids=["missing bucket", "read-only", "wrong secret", "unknown key"],
)
def test_a_bucket_that_refuses_is_named_and_what_to_do(s3_server, s3_url, change, url, expected, caplog):
    caplog.set_level(logging.DEBUG, "lazysnap")
    options = {**s3_server.options(), **change}
    storage = S3Storage(url or s3_url, options)
    with pytest.raises(LevelError, match=expected) as caught:
        upload(storage, pattern(100))

    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(storage)
    assert options["secret"] not in shown


def test_without_credentials_it_says_where_they_are_looked_for(s3_server, s3_url, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    storage = S3Storage(s3_url, {"endpoint_url": s3_server.endpoint})
    with pytest.raises(LevelError, match="no credentials for bucket 'lazysnap'; give key and secret"):
        storage.list()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"default_block_size": 1},
            r"\['default_block_size'\] are not supported here; use key, secret, token, endpoint_url",
        ),
        ({"session": object(), "max_concurrency": 3}, r"\['max_concurrency', 'session'\] are not supported here"),
        ({"client_kwargs": {"no_such": 1}}, "no_such"),
        ({"config_kwargs": {"no_such": 1}}, "no_such"),
        ({"endpoint_url": "no scheme"}, "Invalid endpoint"),
        ({"profile": "nobody"}, "nobody"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_cannot_work_are_refused_at_once(options, expected):
    secret = uuid.uuid4().hex  # tracebacks quote this file
    with pytest.raises(LevelError, match=f"correct storage_options.*{expected}") as caught:
        S3Storage("s3://bucket/run", {"key": "one-key", "secret": secret, **options})
    assert secret not in "".join(traceback.format_exception(caught.value))


def test_a_url_without_a_bucket_is_refused_at_once():
    with pytest.raises(LevelError, match="names no bucket"):
        S3Storage("s3://")


def test_options_of_s3fs_reach_the_server(s3_proxy, s3_server, s3_url, tmp_path, monkeypatch):
    """A profile, extra arguments of requests, requests that are paid for by the requester."""
    file = tmp_path / "credentials"
    secret = s3_server.options()["secret"]
    file.write_text(f"[training]\naws_access_key_id={seaweed.WRITER}\naws_secret_access_key={secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = {
        "profile": "training",
        "requester_pays": True,
        "s3_additional_kwargs": {"StorageClass": "STANDARD_IA"},
        "config_kwargs": {"read_timeout": 30, "request_checksum_calculation": "when_required"},
        "client_kwargs": {"endpoint_url": s3_proxy.endpoint, "region_name": "eu-test-1"},
    }
    storage = S3Storage(s3_url, options)
    upload(storage, pattern(SIZE))
    storage.list()

    seen = {
        request.operation: {name.lower(): value for name, value in request.headers.items()}
        for request in s3_proxy.requests
    }
    assert {headers.get("x-amz-storage-class") for name, headers in seen.items() if name == "create"} == {"STANDARD_IA"}
    assert all("x-amz-storage-class" not in seen[name] for name in ("part", "GET", "HEAD"))
    assert {seen[name].get("x-amz-request-payer") for name in ("create", "part", "complete", "HEAD")} == {"requester"}
    assert all("/eu-test-1/s3/" in headers["authorization"] for headers in seen.values())
    assert not [name for headers in seen.values() for name in headers if name.startswith("x-amz-checksum")]


def test_without_credentials_requests_are_not_signed(s3_proxy, s3_url):
    storage = S3Storage(s3_url, {"anon": True, "endpoint_url": s3_proxy.endpoint})
    with pytest.raises(LevelError, match="access to bucket 'lazysnap' was refused"):
        storage.list()

    assert {request.access_key for request in s3_proxy.requests} == {""}


def test_the_configuration_of_fsspec_counts_where_nothing_is_given(s3_server, s3_url, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "s3", {**s3_server.options(), "default_block_size": 1 << 20})
    storage = S3Storage(s3_url)
    storage.put(SHARD, b"x")

    assert s3_server.options()["secret"] not in repr(storage)
    assert (
        S3Storage(s3_url, {"key": seaweed.SECOND, "secret": s3_server.options(seaweed.SECOND)["secret"]}).size(SHARD)
        == 1
    )


FORK = """
storage.put(f"{directory_of(1)}/object", b"before")
pid = os.fork()
if pid == 0:
    try:
        storage.get(f"{directory_of(1)}/object")
    except LevelError as error:
        say(error)
    finally:
        os._exit(0)
os.waitpid(pid, 0)
say(storage.get(f"{directory_of(1)}/object").decode())
"""


def test_a_forked_process_is_refused_instead_of_hanging(s3_server, s3_url):
    with child(s3_url, s3_server.options(), "from lazysnap.errors import LevelError\n" + FORK) as forks:
        assert "was forked from process" in next_line(forks)
        assert next_line(forks) == "before"


def test_importing_levels_does_not_import_the_library_of_s3():
    code = "import sys, lazysnap.levels, lazysnap.keeper.loop; assert not {'botocore', 'obstore'} & set(sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_without_the_library_it_says_what_to_install():
    code = """
import sys
sys.modules["obstore"] = None
from lazysnap.levels.store import open_storage
open_storage("s3://bucket/run")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "LevelError: s3://bucket/run: needs obstore: pip install 'lazysnap[s3]'" in done.stderr
