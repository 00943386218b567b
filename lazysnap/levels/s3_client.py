"""Requests to one S3 bucket through botocore: repeated within a deadline, refused with an error that says what to do.

When credentials expire, the next request reads them again from the environment and the credential files.
"""

import contextlib
import io
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import botocore
import botocore.session
import fsspec
from botocore.config import Config

from lazysnap import faults
from lazysnap.errors import LevelError, LevelFull, LevelUnavailable
from lazysnap.levels.redaction import Redaction
from lazysnap.levels.s3_errors import Failure, Kind, classify
from lazysnap.levels.storage import level_error

logger = logging.getLogger(__name__)

_draws = random.SystemRandom()
"""The global generators are the training's."""
Result = TypeVar("Result")

PATIENCE_S = 45.0
"""A request is repeated for this long after its first failure."""
STALL_S = 20.0
"""A request that moves no byte for this long has failed."""
_CONNECT_S = 10.0
_MAX_DELAY_S = 5.0
_CONNECTIONS = 32
_CHUNK = 256 << 10
"""Bytes handed to a socket, or taken from it, at once."""

_OF_CLIENT = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "endpoint_url",
}
_OTHERS = ("use_ssl", "profile", "anon", "client_kwargs", "config_kwargs", "requester_pays", "s3_additional_kwargs")
_SUPPORTED = (*_OF_CLIENT, *_OTHERS)


@dataclass(frozen=True)
class S3Options:
    """``storage_options``, as arguments of botocore: the names are those of s3fs."""

    profile: str | None
    client: Mapping[str, Any]
    """Of ``Session.create_client``."""
    config: Mapping[str, Any]
    """Of ``botocore.config.Config``."""
    requests: Mapping[str, Any]
    """Of every request whose operation knows them."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "S3Options":
        """What is not given comes from fsspec's configuration, as in s3fs. Raises: ValueError, for other options."""
        unknown = sorted(given.keys() - set(_SUPPORTED))
        if unknown:
            raise ValueError(f"storage_options {unknown} are not supported here; use {', '.join(_SUPPORTED)}")
        options = {**fsspec.config.conf.get("s3", {}), **given}
        client = {"use_ssl": options.get("use_ssl", True), **(options.get("client_kwargs") or {})}
        client |= {theirs: options[name] for name, theirs in _OF_CLIENT.items() if options.get(name) is not None}
        config = dict(options.get("config_kwargs") or {})
        if options.get("anon"):
            config["signature_version"] = botocore.UNSIGNED
        payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
        requests = {**payer, **(options.get("s3_additional_kwargs") or {})}
        return cls(options.get("profile"), client, config, requests)

    def create_client(self, stall_s: float) -> Any:
        """A client in a session of its own, which reads credentials anew. Raises: what botocore raises.

        Below what is given: one attempt (``S3Client`` repeats), and no signature over bodies, which costs more than
        sending. Parts carry a checksum of ours, and the request that carries it is signed. Checksums that botocore
        would add by itself are refused by old servers.
        """
        config = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(_CONNECT_S, stall_s),  # also of each chunk that is sent
            "read_timeout": stall_s,
            "max_pool_connections": _CONNECTIONS,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **self.config,
            "s3": {"payload_signing_enabled": False, **(self.config.get("s3") or {})},
        }
        session = botocore.session.Session(profile=self.profile)
        return session.create_client("s3", config=Config(**config), **self.client)


class MemoryBody:
    """Memory as a file, for the body of a request: botocore takes no memoryview. It is not copied."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        """At least ``_CHUNK`` bytes, if there are so many: urllib3 asks for 16 KiB."""
        end = len(self._data) if size < 0 else self._position + max(size, _CHUNK)
        piece = self._data[self._position : end]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See ``io.IOBase``."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        return self._position

    def tell(self) -> int:
        """See ``io.IOBase``."""
        return self._position


class S3Client:
    """Requests to one bucket, below one prefix. Thread-safe, also after a fork."""

    def __init__(self, url: str, options: Mapping[str, Any], patience_s: float, stall_s: float) -> None:
        """Makes no request. Raises: LevelUnavailable, for options that are not supported."""
        parts = urlsplit(url)
        self.url = url
        self.bucket, self.prefix = parts.netloc, parts.path.strip("/")
        self.redaction = Redaction(url, options)
        self.patience_s = patience_s
        self._stall_s = stall_s
        self.shown_url = self.redaction.clean(url)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._inherited: list[Any] = []
        self._botocore: Any = None
        if not self.bucket:
            raise LevelUnavailable(f"{self.shown_url}: names no bucket; write s3://bucket/prefix")
        try:
            self._options = S3Options.parse(options)
        except ValueError as error:
            raise self._refused_options(error) from None
        self.redaction = Redaction(url, {**options, **self._options.client})  # also what fsspec's configuration gives
        self.endpoint = str(self._client().meta.endpoint_url)

    # ---------------------------------------------------------------- clients

    def _client(self) -> Any:
        """Raises: LevelUnavailable."""
        if self._pid != os.getpid():
            # The lock may have been held at the fork. The inherited client is kept: collecting it would say goodbye on
            # the parent's connections.
            self._lock, self._pid = threading.Lock(), os.getpid()
            self._inherited.append(self._botocore)
            self._botocore = None
        with self._lock:
            if self._botocore is None:
                try:
                    self._botocore = self._options.create_client(self._stall_s)
                except Exception as error:  # noqa: BLE001  botocore's own types, TypeError, ValueError: all of options
                    raise self._refused_options(error) from None
            return self._botocore

    def _renew(self, old: Any) -> None:
        """Let the next request make a client, which reads the credentials again."""
        with self._lock:
            if self._botocore is old:
                self._botocore = None

    def _refused_options(self, error: Exception) -> LevelUnavailable:
        return LevelUnavailable(f"{self.shown_url}: {self.redaction.clean(error)}; correct storage_options")

    # ---------------------------------------------------------------- requests

    def call(
        self, what: str, method: str, *, keep: tuple[Kind, ...] = (), patience_s: float | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Make one request; ``what`` it is for goes into messages. A memoryview as ``Body`` is sent as it is. Blocks.

        Raises: LevelError; Failure, for the kinds in ``keep``; FileNotFoundError, if there is no such object.
        """

        def attempt(client: Any) -> dict[str, Any]:
            return self._request(client, method, arguments)

        return self._repeat(what, attempt, keep, self.patience_s if patience_s is None else patience_s)

    def _request(self, client: Any, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        body = arguments.get("Body")
        sent = {**arguments, "Body": MemoryBody(body)} if isinstance(body, memoryview) else arguments
        operation = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
        known = operation.input_shape.members
        extra = {name: value for name, value in self._options.requests.items() if name in known}
        answer: dict[str, Any] = getattr(client, method)(Bucket=self.bucket, **{**extra, **sent})
        return answer

    def key(self, path: str) -> str:
        """The object's key in the bucket."""
        return f"{self.prefix}/{path}" if self.prefix else path

    def reach(self, point: str, path: str) -> None:
        """A fault point of tests. Raises: LevelError."""
        try:
            faults.point(f"level.s3.{point}")
        except OSError as error:
            raise level_error(self.url, f"{point} {path}", error) from error

    def put(self, path: str, data: bytes, **checksum: Any) -> None:
        """Put a small object by one request. Raises: LevelError."""
        self.reach("put", path)
        self.call(f"putting {path}", "put_object", Key=self.key(path), Body=data, **checksum)
        self.reach("put_done", path)

    def head(self, path: str) -> dict[str, Any]:
        """Facts about an object. Raises: LevelError, FileNotFoundError."""
        what, key = f"looking at {path}", self.key(path)
        try:
            return self.call(what, "head_object", keep=(Kind.REFUSED, Kind.OTHER), Key=key)
        except Failure as failure:
            # A refused HEAD has no body with the reason. A refused GET has.
            self.receive(path, 0, memoryview(bytearray(1)))
            raise self._error(what, failure) from failure

    def delete(self, path: str) -> None:
        """Delete an object; S3 does not say whether there was one. Raises: LevelError."""
        self.reach("delete", path)
        try:
            self.call(f"deleting {path}", "delete_object", Key=self.key(path))
        except FileNotFoundError:
            return
        self.reach("deleted", path)

    def abort(self, key: str, upload: str, *, patience_s: float | None = None) -> None:
        """Give up a multipart upload; harmless if it is gone. Raises: LevelError."""
        what = f"aborting an upload of {key}"
        keep = (Kind.NO_UPLOAD,)
        with contextlib.suppress(Failure, FileNotFoundError):
            self.call(what, "abort_multipart_upload", keep=keep, patience_s=patience_s, Key=key, UploadId=upload)

    def receive(self, path: str, offset: int, out: memoryview, etag: str = "") -> int:
        """Fill ``out`` from ``offset`` of an object; fewer bytes only if the object ends before. Blocks.

        After a broken connection only the rest is asked for. Raises: as ``call``; Failure of the kind REPLACED, if the
        object has another ``etag``.
        """
        key, done = self.key(path), 0
        condition = {"IfMatch": etag} if etag else {}

        def attempt(client: Any) -> None:
            nonlocal done
            start = offset + done
            span = f"bytes={start}-{offset + len(out) - 1}"
            answer = self._request(client, "get_object", {"Key": key, "Range": span, **condition})
            with contextlib.closing(answer["Body"]) as body:
                if start and "ContentRange" not in answer:
                    raise Failure(Kind.OTHER, "NoRange", "the server does not serve ranges of objects")
                while done < len(out) and (count := body.readinto(out[done : done + _CHUNK])):
                    done += count

        try:
            self._repeat(f"reading {path} at {offset}", attempt, (Kind.RANGE, Kind.REPLACED), self.patience_s)
        except Failure as failure:
            if failure.kind is Kind.REPLACED:
                raise
        return done

    def receive_all(self, path: str, max_bytes: int) -> bytes | None:
        """A small object whole; ``None`` if it is larger than ``max_bytes``. Blocks. Raises: as ``call``."""
        key = self.key(path)

        def attempt(client: Any) -> bytes | None:
            answer = self._request(client, "get_object", {"Key": key})
            with contextlib.closing(answer["Body"]) as body:
                return None if int(answer["ContentLength"]) > max_bytes else bytes(body.read())

        return self._repeat(f"reading {path}", attempt, (), self.patience_s)

    def _repeat(self, what: str, attempt: Callable[[Any], Result], keep: tuple[Kind, ...], patience_s: float) -> Result:
        """Raises: as ``call``."""
        deadline = None
        has_renewed = False
        for number in itertools.count(1):
            client = self._client()
            try:
                return attempt(client)
            except Exception as error:  # noqa: BLE001  botocore, urllib3 and http.client raise their own types
                cause = error
            failure = classify(cause)
            if failure.kind in keep:
                raise failure from self.redaction.cause(cause)
            if failure.kind in (Kind.EXPIRED, Kind.WRONG, Kind.ABSENT, Kind.REFUSED):
                self._renew(client)
                if not has_renewed and failure.kind is not Kind.REFUSED:
                    has_renewed = True  # fresh ones may be in the environment or the files by now
                    continue
            now = time.monotonic()
            deadline = now + patience_s if deadline is None else deadline
            if failure.kind not in (Kind.TRANSIENT, Kind.DAMAGED) or now >= deadline:
                raise self._error(what, failure, number) from self.redaction.cause(cause)
            logger.debug("%s: %s: attempt %d: %s", self.shown_url, what, number, self.redaction.clean(failure))
            delay_s = _draws.uniform(0.5, 1.0) * min(_MAX_DELAY_S, 0.1 * 2 ** min(number, 10))
            time.sleep(min(delay_s, max(0.0, deadline - now)))
        raise AssertionError("attempts without end")

    def _error(self, what: str, failure: Failure, attempts: int = 1) -> LevelError | FileNotFoundError:
        """A failure as one of our errors."""
        text = self.redaction.clean(failure)
        where = f"{self.shown_url}: {what}"
        bucket = repr(self.bucket)
        if failure.kind is Kind.MISSING:
            return FileNotFoundError(2, "no such object", what)
        if failure.kind is Kind.FULL:
            return LevelFull(f"{where}: {text}; free space there or lower keep_last")
        advice = {
            Kind.NO_BUCKET: f"there is no bucket {bucket}; create it, or correct the URL or endpoint",
            Kind.REFUSED: f"access to bucket {bucket} was refused; allow these credentials to list it and to get, put "
            "and delete objects in it, and to abort uploads",
            Kind.WRONG: f"the credentials for bucket {bucket} are wrong; correct key and secret in storage_options, in "
            "the environment or in the credentials file",
            Kind.EXPIRED: f"the credentials for bucket {bucket} have expired; renew them in the environment or the "
            "credentials file: they are read again at the next access",
            Kind.ABSENT: f"no credentials for bucket {bucket}; give key and secret in storage_options, the environment "
            "or a credentials file",
            Kind.TRANSIENT: f"bucket {bucket} does not answer, gave up after {attempts} attempts",
            Kind.DAMAGED: f"bytes arrived damaged at bucket {bucket}, {attempts} times; check the network",
        }.get(failure.kind)
        return LevelUnavailable(f"{where}: {advice} ({text})" if advice else f"{where}: {text}")
