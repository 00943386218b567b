"""The body of an object, received by the thread that wants it, straight into place.

aiohttp copies a body out of its buffers three times, all in the thread of one event loop. So whatever answers with a
body goes over botocore's own connections instead; signing, credentials and the reading of answers stay s3fs's.
"""

import asyncio
import contextlib
import http.client
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import URLLib3Session

Result = TypeVar("Result")

_CHUNK = 64 << 10
"""What is asked for at once: of it nothing counts as received if the connection breaks."""
_MAX_REFUSAL = 1 << 20


class BodyBroke(ConnectionError):
    """The connection ended, or stood still, before the body did."""


class Body(Protocol):
    """The body of one answer, for one thread that is not the event loop's. Blocks."""

    def readinto(self, out: memoryview) -> int:
        """Some of what comes next; 0 at the end. Raises: BodyBroke, or what a session chosen by the user raises."""
        ...

    def close(self) -> None:
        """Let go of the connection; harmless twice."""
        ...


class DirectBody:
    """See ``Body``: received by the calling thread."""

    def __init__(self, response: Any, length: str | None) -> None:
        self._response = response
        # http.client fills a buffer where urllib3 would make bytes and copy them; nothing is to be decoded here.
        self._readinto = getattr(response, "_fp", response).readinto
        self._missing = int(length) if length is not None else None
        self._refusal = b""

    def keep(self) -> None:
        """Receive all now: the text of a refusal, which botocore reads."""
        room = memoryview(bytearray(_MAX_REFUSAL))
        done = 0
        with contextlib.closing(self):
            while done < len(room) and (count := self.readinto(room[done:])):
                done += count
        self._refusal = bytes(room[:done])

    async def read(self) -> bytes:
        """What was kept."""
        return self._refusal

    def readinto(self, out: memoryview) -> int:
        """See ``Body``."""
        try:
            count = int(self._readinto(out[:_CHUNK]))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BodyBroke(f"the body broke off: {type(error).__name__}: {error}") from error
        if self._missing is not None:
            self._missing -= count
            if self._missing and len(out) and not count:
                raise BodyBroke(f"the body ended {self._missing} bytes too early")
        return count

    def close(self) -> None:
        """The connection serves again if all was received."""
        with contextlib.suppress(OSError):
            if self._missing == 0:
                self._response.release_conn()
            else:
                self._response.close()


class LoopBody:
    """See ``Body``: received by the event loop, in a session of the user's choice."""

    def __init__(self, body: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._body = body
        self._loop = loop
        self._error: Exception | None = None

    def readinto(self, out: memoryview) -> int:
        """See ``Body``."""
        return asyncio.run_coroutine_threadsafe(self._fill(out), self._loop).result()

    async def _fill(self, out: memoryview) -> int:
        if self._error is not None:
            raise self._error
        done = 0
        try:
            while done < len(out) and (chunk := await self._body.read(min(_CHUNK, len(out) - done))):
                out[done : done + len(chunk)] = chunk
                done += len(chunk)
        except Exception as error:
            if not done:
                raise
            self._error = error  # what came before it counts
        return done

    def close(self) -> None:
        """See ``Body``."""
        self._loop.call_soon_threadsafe(self._body.close)


def body_of(answer: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Body:
    """The body of an answer of s3fs's."""
    body = answer["Body"]
    raw = getattr(body, "raw_stream", None) or getattr(body, "__wrapped__", None)
    return raw if isinstance(raw, DirectBody) else LoopBody(body, loop)


class DirectSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """What s3fs sends requests with; those that are answered with a body go over connections of botocore's."""

    def __init__(self, *args: Any, connector_args: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, connector_args=connector_args, **options)
        self._direct = URLLib3Session(*args, **options)

    async def send(self, request: Any) -> Any:
        """Raises: what botocore's sessions raise."""
        if not getattr(request, "stream_output", False):
            return await super().send(request)

        def exchange() -> Any:
            answer = self._direct.send(request)
            headers = {name.lower(): value for name, value in answer.headers.items()}
            body = DirectBody(answer.raw, headers.get("content-length"))
            if answer.status_code >= 300:
                body.keep()
            return AioAWSResponse(request.url, answer.status_code, headers, body)

        return await in_thread(exchange, lambda answer: answer.raw.close())

    async def __aexit__(self, *error: object) -> None:
        """End all connections."""
        await super().__aexit__(*error)
        self._direct.close()


async def in_thread(work: Callable[[], Result], drop: Callable[[Result], object]) -> Result:
    """Do it in a thread that no interpreter waits for; a result that nobody waits for any more is dropped."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if error is not None and not future.done():
            future.set_exception(error)
        elif error is None and not future.done():
            future.set_result(result)  # type: ignore[arg-type]
        elif error is None:
            drop(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001  handed to who waits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="lazysnap-request", daemon=True).start()
    return await future
