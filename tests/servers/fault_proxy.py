"""An HTTP proxy on loopback that hands requests on to a real server, and breaks those that it is told to."""

import contextlib
import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

_CHUNK = 64 << 10


@dataclass(frozen=True)
class Request:
    """What a rule decides by."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]

    @property
    def operation(self) -> str:
        """``part``, ``create``, ``complete``, ``abort``, else the method."""
        if "partNumber" in self.query:
            return "part"
        if "uploads" in self.query:
            return "create" if self.method == "POST" else "uploads"
        if "uploadId" in self.query:
            return {"POST": "complete", "DELETE": "abort"}[self.method]
        return self.method

    @property
    def access_key(self) -> str:
        headers = {name.lower(): value for name, value in self.headers.items()}
        found = re.search(r"Credential=([^/]+)/", headers.get("authorization", ""))
        return found[1] if found else ""


Act = Callable[["_Handler"], bool]
"""Returns whether the request is done with; else it is handed on."""
Sign = Callable[[str, str, dict[str, str]], dict[str, str]]
"""Method, path with query, headers: the headers signed anew, with the body left out."""


@dataclass
class Rule:
    matches: Callable[[Request], bool]
    act: Act
    times: int | None
    hits: int = 0


def answer(status: int, code: str) -> Act:
    """Refuse, as S3 does."""

    def act(handler: "_Handler") -> bool:
        handler.drop_body()
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", "0" if handler.command == "HEAD" else str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)
        return True

    return act


def reset(after_bytes: int = 0) -> Act:
    """Break the connection (RST) when so much of the body has arrived."""

    def act(handler: "_Handler") -> bool:
        handler.rfile.read(min(after_bytes, handler.body_left))
        handler.break_connection()
        return True

    return act


def reset_after() -> Act:
    """Hand the request on, and lose the answer."""

    def act(handler: "_Handler") -> bool:
        handler.hand_on(is_answered=False)
        handler.break_connection()
        return True

    return act


def cut_answer(after_bytes: int, *, is_reset: bool = True) -> Act:
    """Hand the request on, and end the connection in the middle of the answer's body.

    A reset may take with it what the client has not read yet.
    """

    def act(handler: "_Handler") -> bool:
        handler.hand_on(max_answer=after_bytes)
        if is_reset:
            handler.break_connection()
        handler.close_connection = True
        return True

    return act


def without(*headers: str) -> Act:
    """Hand it on without some headers, signed anew: a server that knows them not."""

    def act(handler: "_Handler") -> bool:
        handler.stripped.update(header.lower() for header in headers)
        return False

    return act


def flip() -> Act:
    """Hand it on with one bit of its body changed."""

    def act(handler: "_Handler") -> bool:
        handler.flips = True
        return False

    return act


@dataclass
class Stall:
    """Accept and never answer, until ``release``."""

    released: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def __call__(self, handler: "_Handler") -> bool:
        self.reached.set()
        self.released.wait(60)
        handler.break_connection()
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FaultProxy"

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the client went away
            super().handle()

    def handle_expect_100(self) -> bool:
        return True  # when the body is read

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _handle(self) -> None:
        self.body_left = int(self.headers.get("Content-Length", 0))
        self.stripped: set[str] = set()
        self.flips = False
        parts = urlsplit(self.path)
        request = Request(
            self.command, parts.path, parse_qs(parts.query, keep_blank_values=True), dict(self.headers.items())
        )
        for act in self.server.due(request):
            if isinstance(act, Stall):
                if act(self):
                    return
                continue
            self._continue()
            if act(self):
                return
        self._continue()
        self.hand_on()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _continue(self) -> None:
        if self.headers.get("Expect", "").lower() == "100-continue":
            del self.headers["Expect"]
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def drop_body(self) -> None:
        while self.body_left:
            self.body_left -= len(self.rfile.read(min(_CHUNK, self.body_left)) or b"x" * self.body_left)

    def break_connection(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            # Not shutdown, which would say goodbye: all copies of the descriptor are closed, so a reset is sent.
            self.rfile.close()
            self.wfile.close()
            self.connection.close()

    def hand_on(self, *, is_answered: bool = True, max_answer: int | None = None) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in {"connection", "expect"}
            }
            if self.stripped:
                headers = {name: value for name, value in headers.items() if name.lower() not in self.stripped}
                headers = self.server.sign(self.command, self.path, headers)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                upstream.putheader(name, value)
            upstream.endheaders()
            while self.body_left:
                chunk = self.rfile.read(min(_CHUNK, self.body_left))
                if not chunk:
                    return
                self.body_left -= len(chunk)
                if self.flips:
                    self.flips = False
                    chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
                upstream.send(chunk)
            reply = upstream.getresponse()
            if not is_answered:
                reply.read()
                return
            self.send_response_only(reply.status, reply.reason)
            for name, value in reply.getheaders():
                if name.lower() != "connection":
                    self.send_header(name, value)
            self.end_headers()
            left = max_answer
            while chunk := reply.read(_CHUNK if left is None else min(left, _CHUNK)):
                self.wfile.write(chunk)
                left = left if left is None else left - len(chunk)
        except (OSError, http.client.HTTPException):
            self.break_connection()  # as the server itself would
        finally:
            upstream.close()


class FaultProxy(ThreadingHTTPServer):
    """Before ``upstream`` (``host:port``). Rules are tried in order; all that match act, until one ends the request."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, upstream: str, sign: Sign) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.sign = sign
        self.connections: set[socket.socket] = set()
        self.requests: list[Request] = []
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        pass

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def rule(self, operation: str | Callable[[Request], bool], act: Act, times: int | None = None) -> Rule:
        """From now on: for requests of an operation (``*``: all), at most ``times`` of them."""
        matches = operation if callable(operation) else lambda request: operation in ("*", request.operation)
        with self._lock:
            self._rules.append(Rule(matches, act, times))
            return self._rules[-1]

    def clear(self) -> None:
        """All is well again."""
        with self._lock:
            self._rules.clear()

    def due(self, request: Request) -> list[Act]:
        with self._lock:
            self.requests.append(request)
            found = [
                rule for rule in self._rules if rule.matches(request) and (rule.times is None or rule.hits < rule.times)
            ]
            for rule in found:
                rule.hits += 1
            return [rule.act for rule in found]


@contextlib.contextmanager
def before(upstream: str, sign: Sign) -> Iterator[FaultProxy]:
    """A proxy for as long as the block lasts."""
    proxy = FaultProxy(upstream, sign)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        for connection in list(proxy.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(10)
