"""An S3 bucket as a place for snapshots: obstore moves the bytes, behind its fsspec face.

botocore finds credentials, region and endpoint as every program for AWS (environment, ``~/.aws``, roles). It also
aborts the uploads of dead writers, which obstore cannot list.
"""

import atexit
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import fsspec
import obstore
from botocore.config import Config
from botocore.exceptions import ClientError
from obstore.fsspec import FsspecStore

from lazysnap.errors import LevelError
from lazysnap.levels.fsspec_storage import Abilities, FsspecStorage
from lazysnap.levels.leftovers import is_node_file_path
from lazysnap.levels.storage import STALE_FACTOR, is_probe, no_beat, probe_name
from lazysnap.levels.threads import in_threads

logger = logging.getLogger(__name__)

PARTS_AT_A_TIME = 4
COPIED_PART_BYTES = 256 << 20
"""Bytes that the server copies in one request."""
LIMITS_S = {"connect_timeout": 10.0, "read_timeout": 60.0}
"""Deadlines of a connection and of a request, unless ``config_kwargs`` gives others."""
PATIENCE_S = 45.0
"""A request is repeated for this long."""
_CREDENTIALS_S = 600.0
"""The credentials are read again after this long."""

_OF_CLIENT = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "endpoint_url",
}
_OF_STORE = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_OTHERS = ("use_ssl", "profile", "anon", "client_kwargs", "config_kwargs", "requester_pays", "s3_additional_kwargs")
_KNOWN = {
    "storage_options": (*_OF_CLIENT, *_OTHERS),
    "config_kwargs": (*LIMITS_S, "s3", "request_checksum_calculation"),
    "s3_additional_kwargs": ("ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled", "StorageClass"),
}

_FULL = "QuotaExceeded|XMinioStorageFull"
_DAMAGED = "BadDigest|InvalidDigest|XAmzContentChecksumMismatch"
_ADVICE = {
    "NoSuchBucket": "there is no bucket {}; create it, or correct the URL or endpoint",
    "AccessDenied|AllAccessDisabled|PermissionDeniedError": "access to bucket {} was refused; allow these credentials "
    "to list it and to get, put and delete objects in it, and to abort uploads",
    "InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken": "the credentials for bucket {} are wrong; correct key and "
    "secret in storage_options, in the environment or in the credentials file",
    "ExpiredToken|TokenRefreshRequired": "the credentials for bucket {} have expired; renew them in the environment or "
    "the credentials file: they are read again at the next access",
    _DAMAGED: "bytes arrived damaged at bucket {}; check the network",
    _FULL: "bucket {} is full; free space there or lower keep_last",
    "Unanswered|SlowDown|InternalError|ServiceUnavailable": "bucket {} does not answer",
}
"""Texts by the server's codes, or by classes of obstore where the server gives no code."""

_compares: dict[tuple[str, str], bool] = {}
"""True by endpoint and bucket if the server refuses an object whose checksum is wrong."""
_pid = 0
"""The process that opened a bucket first. After a fork obstore has no threads: a call would never return."""


class S3Driver(FsspecStore):
    """obstore's fsspec driver of one bucket, opened with the options of s3fs."""

    cachable = False

    def __init__(self, bucket: str, options: Mapping[str, Any]) -> None:
        """Make no request. Raises: ValueError, for options that are not supported; as botocore."""
        config = options.get("config_kwargs") or {}
        attributes = options.get("s3_additional_kwargs") or {}
        _check_options("storage_options", options)
        _check_options("config_kwargs", config)
        _check_options("s3_additional_kwargs", attributes)
        limits = {**LIMITS_S, **config}
        is_anonymous = bool(options.get("anon"))
        client = _client_arguments(options)
        self._session = botocore.session.Session(profile=options.get("profile"))
        settings = {"retries": {"total_max_attempts": 1}, **limits}
        if is_anonymous:
            settings["signature_version"] = botocore.UNSIGNED
        self._client = self._session.create_client("s3", config=Config(**settings), **client)
        self._bucket = bucket
        self.address = (str(self._client.meta.endpoint_url), bucket)
        """The endpoint, and the bucket there."""
        self.sends_checksums = config.get("request_checksum_calculation") != "when_required"
        """True if each object and part is sent with its checksum."""
        arguments: Any = {
            "config": self._store_config(options, {**client, **attributes}),
            "client_options": _client_options(limits, client.get("verify")),
            "retry_config": _retries(),
        }
        if not is_anonymous and "aws_access_key_id" not in client:
            arguments["credential_provider"] = self._credentials
        super().__init__("s3", **arguments)
        self._attributes = attributes
        """Attributes of each new object."""
        self._store = self._construct_store(bucket)

    def _store_config(self, options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of obstore. ``values``: arguments of botocore that obstore has, too."""
        style = (options.get("config_kwargs") or {}).get("s3") or {}
        is_virtual = style.get("addressing_style") == "virtual"
        endpoint, bucket = self.address
        if is_virtual:
            endpoint = endpoint.replace("://", f"://{bucket}.", 1)
        config = {
            "endpoint": endpoint,
            "region": self._client.meta.region_name,
            "skip_signature": bool(options.get("anon")),
            "request_payer": bool(options.get("requester_pays")),
            # A signature over the bodies costs more than sending them.
            "unsigned_payload": not style.get("payload_signing_enabled"),
            "virtual_hosted_style_request": is_virtual,
            "disable_bulk_delete": True,  # some servers lack it
        }
        if self.sends_checksums:
            config["checksum_algorithm"] = "crc64nvme"
        for name, argument in _OF_STORE.items():
            if values.get(name):
                config[argument] = values[name]
        return config

    def _credentials(self) -> dict[str, Any]:
        credentials = self._session.get_credentials()
        if credentials is None:
            raise ValueError(
                f"no credentials for bucket {self._bucket!r}; give key and secret in storage_options, the environment "
                "or a credentials file"
            )
        keys = credentials.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=_CREDENTIALS_S),
        }

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        """Return a range of an object, or all of it. Unlike the base class, use no event loop."""
        key = self._split_path(path)[1]
        if start is None or end is None:
            return memoryview(obstore.get(self._store, key).bytes())
        return memoryview(obstore.get_range(self._store, key, start=start, end=end))

    def open(self, path: str, mode: str = "wb", block_size: int | None = None, **options: Any) -> "Upload":
        """Start to send an object in parts of ``block_size``."""
        key = self._split_path(path)[1]
        arguments: Any = {"buffer_size": block_size, "max_concurrency": PARTS_AT_A_TIME}
        storage_class = self._attributes.get("StorageClass")
        if storage_class:
            arguments["attributes"] = {"Storage-Class": storage_class}
        writer = obstore.open_writer(self._store, key, **arguments)
        return Upload(writer, partial(self.abort_uploads, key))

    def copy_object(self, path: str, new_path: str, beat: Callable[[], object]) -> None:
        """Have the server copy an object in parts. Blocks. ``beat``: called after each, from several threads.

        Raises: as botocore and ``beat``; then the copy does not exist.
        """
        source = {"Bucket": self._bucket, "Key": self._split_path(path)[1]}
        size_bytes = self._client.head_object(**source)["ContentLength"]
        place = {"Bucket": self._bucket, "Key": self._split_path(new_path)[1]}
        upload = {**place, "UploadId": self._client.create_multipart_upload(**place, **self._attributes)["UploadId"]}

        def copy_part(start: int) -> dict[str, Any]:
            number = start // COPIED_PART_BYTES + 1
            part = f"bytes={start}-{min(start + COPIED_PART_BYTES, size_bytes) - 1}"
            reply = self._client.upload_part_copy(**upload, PartNumber=number, CopySource=source, CopySourceRange=part)
            beat()
            return {"PartNumber": number, "ETag": reply["CopyPartResult"]["ETag"]}

        try:
            tasks = [partial(copy_part, start) for start in range(0, size_bytes, COPIED_PART_BYTES)]
            parts = in_threads(tasks, PARTS_AT_A_TIME, "lazysnap-copy")
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except BaseException:
            self._client.abort_multipart_upload(**upload)
            raise

    def rmdir(self, path: str) -> None:
        """Delete the empty object that some servers keep with the name of an empty directory."""
        self._client.delete_object(Bucket=self._bucket, Key=f"{self._split_path(path)[1]}/")

    def abort_uploads(self, prefix: str, is_stale: Callable[[Any], bool] | None = None) -> list[str]:
        """Abort the uploads below a prefix that are stale (default: all). Return their keys.

        Blocks. Raises: as botocore.
        """
        aborted = []
        for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                if is_stale is not None and not is_stale(upload):
                    continue
                key = str(upload["Key"])
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload["UploadId"])
                aborted.append(key)
        return aborted

    def compares_checksums(self, path: str) -> bool:
        """True if the server refuses an object whose checksum is wrong. Blocks. Raises: as botocore."""
        place = {"Bucket": self._bucket, "Key": self._split_path(path)[1]}
        try:
            self._client.put_object(**place, Body=b"probe", ChecksumCRC64NVME="AAAAAAAAAAA=")
        except ClientError as error:
            return re.fullmatch(_DAMAGED, error.response["Error"]["Code"]) is not None
        self._client.delete_object(**place)
        return False


def _check_options(where: str, options: Mapping[str, Any]) -> None:
    """Raises: ValueError, for options that are not supported."""
    unknown = sorted(options.keys() - set(_KNOWN[where]))
    if unknown:
        raise ValueError(f"{where} {unknown} are not supported here; use {', '.join(_KNOWN[where])}")


def _client_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a client of botocore."""
    arguments = {"use_ssl": options.get("use_ssl", True), **(options.get("client_kwargs") or {})}
    for option, argument in _OF_CLIENT.items():
        if options.get(option) is not None:
            arguments[argument] = options[option]
    return arguments


def _client_options(limits: Mapping[str, Any], verify: object) -> dict[str, Any]:
    """Return obstore's options of connections. ``verify``: false, or the file of a root certificate; else its own."""
    options: dict[str, Any] = {
        "allow_http": True,
        "allow_invalid_certificates": verify is False,
        "connect_timeout": timedelta(seconds=limits["connect_timeout"]),
        "timeout": timedelta(seconds=limits["read_timeout"]),
    }
    if isinstance(verify, str):
        options["root_certificate"] = Path(verify).read_bytes()
    return options


def _retries() -> dict[str, Any]:
    """Return obstore's settings of retries."""
    # The pauses are drawn between the first and ``base`` times the last: twice would not grow.
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 4}
    return {"max_retries": 100, "retry_timeout": timedelta(seconds=PATIENCE_S), "backoff": backoff}


class Upload:
    """One object that is being sent, as ``FsspecWriter`` uses a file."""

    def __init__(self, writer: Any, abort: Callable[[], object]) -> None:
        self._writer = writer
        self._abort = abort
        self.write = writer.write
        self.close = writer.close

    def discard(self) -> None:
        """Abort the upload. Blocks. Raises: as botocore."""
        self._writer = self.write = self.close = None
        self._abort()


class S3Storage(FsspecStorage):
    """See ``levels.storage.Storage``."""

    parallel_reads = 4

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Make no request. Raises: LevelError."""
        fsspec_config = fsspec.config.conf.get("s3", {})
        defaults = {name: fsspec_config[name] for name in _KNOWN["storage_options"] if name in fsspec_config}
        super().__init__(url, {**defaults, **(options or {})})

    def _open_driver(self) -> tuple[S3Driver, str]:
        global _pid
        if not _pid:
            _pid = os.getpid()
            # Threads of obstore take the interpreter's lock when a request ends. While the interpreter exits, this
            # aborts the process, and nothing joins these threads. This pause lets most requests end. A longer request
            # still aborts the process with the exit status of SIGABRT. No stored snapshot is lost by that.
            atexit.register(time.sleep, 0.1)
        if _pid != os.getpid():
            raise LevelError(
                f"this process was forked from process {_pid}, which had used S3, and obstore does not survive a fork; "
                "start processes by the method 'spawn' or 'forkserver'"
            )
        parts = urlsplit(self.url)
        if not parts.netloc:
            raise LevelError("the URL names no bucket; write s3://bucket/prefix")
        return S3Driver(parts.netloc, self._options), f"{parts.netloc}/{parts.path.strip('/')}"

    def _error(self, action: str, error: BaseException) -> LevelError:
        self._opened = None  # the next operation reads the credentials again
        # obstore adds a dump of its data structures to its messages.
        text = " ".join(self._redaction.clean(error).split("Debug source:")[0].split())
        match = re.search(r"<Code>(\w+)</Code>|\((\w+)\) when calling", text)
        if match:
            code = match[1] or match[2]
        elif " retries, " in text or "HTTP error" in text:
            code = "Unanswered"
        else:
            code = type(error).__name__
        advice = code
        for codes, advice_of_codes in _ADVICE.items():
            if re.fullmatch(codes, code):
                advice = advice_of_codes
                break
        bucket = repr(urlsplit(self.url).netloc)
        return LevelError(f"{self.url}: {action}: {advice.format(bucket)} ({text})")

    def call(self, action: str, method: Any, *arguments: Any, **options: Any) -> Any:
        """See ``FsspecStorage.call``. A missing bucket is a LevelError, not a missing object."""
        try:
            return super().call(action, method, *arguments, **options)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._error(action, error) from self._redaction.cause(error)
            raise FileNotFoundError(2, "no such object", action) from None

    def abilities(self) -> Abilities:
        """Return the abilities of S3 without a test. It refuses clients whose clock is minutes off."""
        return Abilities(shows_open_files=False, clock_ahead_s=0.0)

    def checks_writes(self) -> bool:
        """See ``Storage.checks_writes``. Tested once per process; false where a test is not possible."""
        try:
            driver: S3Driver = self._filesystem()
            if not driver.sends_checksums:
                return False
            if driver.address not in _compares:
                _compares[driver.address] = self._call("trying it out", "compares_checksums", self._path(probe_name()))
                if not _compares[driver.address]:
                    logger.warning("%s: the server does not notice damaged parts; snapshots are read back", self.url)
            return _compares[driver.address]
        except (LevelError, FileNotFoundError):
            return False

    def link(self, path: str, new_path: str, beat: Callable[[], object] = no_beat) -> bool:
        """See ``Storage.link``: the server copies the object."""
        try:
            self._call(f"copying {path} to {new_path}", "copy_object", self._path(path), self._path(new_path), beat)
        except (LevelError, FileNotFoundError) as error:
            logger.info("%s is sent once more: %s", new_path, error)
            return False
        return True

    def _make_directory(self, path: str, *, is_missing: bool = False) -> None:
        """Do nothing: S3 has no directories."""

    def is_link(self, path: str) -> bool:
        """Return False: S3 has no links."""
        return False

    def abort_stale(self) -> list[str]:
        """See ``Storage.abort_stale``. Uploads of other programs stay, and any that began within a day."""
        root = self._path("").partition("/")[2].rstrip("/")
        if root:
            root += "/"
        began_before = datetime.now(timezone.utc) - timedelta(seconds=STALE_FACTOR * self.abandoned_after_s)

        def is_stale_upload(upload: Any) -> bool:
            path = upload["Key"][len(root) :]
            return upload["Initiated"] <= began_before and (is_node_file_path(path) or is_probe(path))

        try:
            keys = self._call("listing uploads", "abort_uploads", root, is_stale_upload)
        except LevelError as error:
            # Unfinished uploads cost money, but harm no snapshot: a missing right must not stop the sweep.
            logger.warning("unfinished uploads are not aborted; let a lifecycle rule do it: %s", error)
            return []
        return [key[len(root) :] for key in keys]
