"""Requests to one S3 bucket through s3fs: retried inside a deadline, refused with an error that says what to do.

Only ``S3FileSystem._call_s3`` is used of s3fs, so its sessions, regions and options hold (SSE, requester pays, …). A
session that expired is made anew, from whatever the environment and the credential files say by then.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from inspect import signature
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from aiobotocore.config import AioConfig

from lazysnap.errors import LevelError, LevelFull, LevelUnavailable
from lazysnap.levels.redaction import Redaction
from lazysnap.levels.s3body import Body, DirectSession, body_of
from lazysnap.levels.s3errors import Failure, Kind, understand
from lazysnap.levels.s3transfer import ViewBody, watched

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Result = TypeVar("Result")
Act = Callable[[Any], Coroutine[Any, Any, Answer]]

PATIENCE_S = 45.0
"""From the first failure on, a request is repeated for so long."""
STALL_S = 20.0
"""A request that moves no byte for so long has failed."""
_CONNECT_S = 10.0
_MAX_DELAY_S = 5.0
_CONNECTIONS = 16
_DIRECT = {"http_session_cls": DirectSession} if "http_session_cls" in signature(AioConfig).parameters else {}
"""Old releases of aiobotocore know no other session; bodies come through their loop."""


def _as_is(answer: Answer) -> Answer:
    return answer


class S3Client:
    """Requests of one bucket. Thread-safe, and of use after a fork."""

    def __init__(self, url: str, options: Mapping[str, Any], patience_s: float, stall_s: float) -> None:
        """Raises: LevelUnavailable, if s3fs is not installed or refuses an option."""
        parts = urlsplit(url)
        self.bucket, self.root = parts.netloc, parts.path.strip("/")
        self.redaction = Redaction(url, options)
        client = options.get("client_kwargs") or {}
        self.endpoint = str(
            options.get("endpoint_url")
            or client.get("endpoint_url")
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL", "")
        )
        self._url = self.redaction.clean(url)
        self.patience_s = patience_s
        self._stall_s = stall_s
        self._options = self._with_defaults(options)
        self._lock = threading.Lock()
        self._hurry = threading.local()
        self._pid = os.getpid()
        self._inherited: list[Any] = []
        self._filesystem: Any = None
        if not self.bucket:
            raise LevelUnavailable(f"{self._url}: names no bucket; write s3://bucket/prefix")
        self._session()

    def _with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Ours below the user's: one attempt (we repeat), a CRC instead of a signature over the body (a third of the
        processor time; the request that carries the CRC is signed), no checksum trailers, which old servers lack."""
        given = dict(options.get("config_kwargs") or {})
        config = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(_CONNECT_S, self._stall_s),
            "read_timeout": self._stall_s,
            "max_pool_connections": _CONNECTIONS,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **_DIRECT,
            **given,
            "s3": {"payload_signing_enabled": False, **(given.get("s3") or {})},
        }
        return {**options, "config_kwargs": config, "skip_instance_cache": True}

    # ---------------------------------------------------------------- sessions

    def _session(self) -> Any:
        if self._pid != os.getpid():
            # The lock may have been held while forking. What was inherited is kept, because to collect it would close
            # sockets that are the parent's.
            self._lock, self._pid = threading.Lock(), os.getpid()
            self._inherited.append(self._filesystem)
            self._filesystem = None
        with self._lock:
            if self._filesystem is None:
                try:
                    self._filesystem = fsspec.filesystem("s3", **self._options)
                except ImportError as error:
                    raise LevelUnavailable(f"{self._url}: needs s3fs: pip install 'lazysnap[s3]'") from error
                except Exception as error:  # noqa: BLE001  options that s3fs refuses
                    text = self.redaction.clean(error)
                    raise LevelUnavailable(f"{self._url}: {text}; correct storage_options") from None
                self._filesystem.retries = 1
            return self._filesystem

    def _renew(self, old: Any) -> None:
        """The next request opens a session that reads the credentials again; those under way end with the old one."""
        with self._lock:
            if self._filesystem is old:
                self._filesystem = None

    # ---------------------------------------------------------------- requests

    def call(self, what: str, method: str, *, keep: tuple[Kind, ...] = (), **arguments: Any) -> dict[str, Any]:
        """One request of the bucket; ``what`` it is for goes into the message. Blocks.

        Raises: LevelError; Failure, for the kinds in ``keep``; FileNotFoundError, if there is no such object.
        """

        async def act(filesystem: Any) -> dict[str, Any]:
            answer: dict[str, Any] = await filesystem._call_s3(method, Bucket=self.bucket, **arguments)
            return answer

        return self.run(what, act, _as_is, keep=keep)

    def send(
        self, what: str, method: str, data: memoryview, *, keep: tuple[Kind, ...] = (), **arguments: Any
    ) -> dict[str, Any]:
        """One request with a body, straight from ``data``. Blocks. Raises: as ``call``."""

        async def act(filesystem: Any) -> dict[str, Any]:
            body = ViewBody(data)
            request = filesystem._call_s3(method, Bucket=self.bucket, Body=body, **arguments)
            answer: dict[str, Any] = await watched(request, body, self._stall_s)
            return answer

        return self.run(what, act, _as_is, keep=keep)

    def receive(self, what: str, key: str, offset: int, out: memoryview, etag: str | None = None) -> tuple[int, str]:
        """Fill ``out`` from ``offset`` of an object; how many bytes there were, and the object's tag.

        What arrived before a connection broke is not asked for again. Raises: as ``call``; with an ``etag``, Failure of
        the kind TAKEN, if the object is another one by now.
        """
        done, tag = 0, etag or ""

        async def act(filesystem: Any) -> Body:
            nonlocal tag
            start = offset + done
            condition = {"IfMatch": tag} if tag else {}
            span = f"bytes={start}-{offset + len(out) - 1}"
            answer = await filesystem._call_s3("get_object", Bucket=self.bucket, Key=key, Range=span, **condition)
            tag = answer.get("ETag", "")
            if start and "ContentRange" not in answer:
                raise Failure(Kind.OTHER, "NoRange", "the server does not serve ranges of objects")
            return body_of(answer, filesystem.loop)

        def take(body: Body) -> None:
            nonlocal done
            with contextlib.closing(body):
                while done < len(out) and (count := body.readinto(out[done:])):
                    done += count

        try:
            self.run(what, act, take, keep=(Kind.RANGE, Kind.TAKEN))
        except Failure as failure:
            if failure.kind is Kind.TAKEN:
                raise
        return done, tag

    def receive_all(self, what: str, key: str, max_bytes: int) -> bytes | None:
        """A small object whole; ``None`` if it is larger than ``max_bytes``. Blocks. Raises: as ``call``."""

        async def act(filesystem: Any) -> tuple[Body, int]:
            answer = await filesystem._call_s3("get_object", Bucket=self.bucket, Key=key)
            return body_of(answer, filesystem.loop), int(answer["ContentLength"])

        def take(found: tuple[Body, int]) -> bytes | None:
            body, size = found
            with contextlib.closing(body):
                if size > max_bytes:
                    return None
                data, done = bytearray(size), 0
                while done < size and (count := body.readinto(memoryview(data)[done:])):
                    done += count
                return bytes(data[:done])

        return self.run(what, act, take)

    def run(
        self, what: str, act: Act[Answer], take: Callable[[Answer], Result], *, keep: tuple[Kind, ...] = ()
    ) -> Result:
        """Ask by ``act``, take what comes by ``take``, and both again if that may help. Blocks. Raises: as ``call``."""
        deadline = None
        has_renewed = False
        for attempt in itertools.count(1):
            filesystem = self._session()
            request = asyncio.run_coroutine_threadsafe(act(filesystem), filesystem.loop)
            try:
                return take(request.result())
            except Exception as error:  # noqa: BLE001  s3fs, botocore and aiohttp raise their own types
                cause = error
            finally:
                request.cancel()  # if this thread was interrupted; else it is done
            failure = understand(cause)
            failure.attempt = attempt
            if failure.kind in keep:
                raise failure from self.redaction.cause(cause)
            if failure.kind in (Kind.EXPIRED, Kind.WRONG, Kind.ABSENT, Kind.REFUSED):
                self._renew(filesystem)
                if not has_renewed and failure.kind is not Kind.REFUSED:
                    has_renewed = True  # somebody may have put fresh ones into the environment or the files
                    continue
            now = time.monotonic()
            if deadline is None:
                deadline = now + (0.0 if getattr(self._hurry, "is_on", False) else self.patience_s)
            if failure.kind not in (Kind.PASSING, Kind.DAMAGED) or now >= deadline:
                raise self.error(what, failure) from self.redaction.cause(cause)
            logger.debug("%s: %s: attempt %d: %s", self._url, what, attempt, failure)
            delay = random.uniform(0.5, 1.0) * min(_MAX_DELAY_S, 0.1 * 2 ** min(attempt, 10))
            time.sleep(min(delay, max(0.0, deadline - now)))
        raise AssertionError("attempts without end")

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Within it, requests of this thread are tried once: for cleaning up after what failed."""
        self._hurry.is_on = True
        try:
            yield
        finally:
            self._hurry.is_on = False

    def error(self, what: str, failure: Failure) -> LevelError | FileNotFoundError:
        """A failure as one of ours."""
        text = self.redaction.clean(failure)
        where = f"{self._url}: {what}"
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
            Kind.PASSING: f"bucket {bucket} does not answer, gave up after {failure.attempt} attempts",
            Kind.DAMAGED: f"bytes arrived damaged at bucket {bucket}, {failure.attempt} times; check the network",
        }.get(failure.kind)
        return LevelUnavailable(f"{where}: {advice} ({text})" if advice else f"{where}: {text}")
