"""What tests of S3 do: clients, uploads, and children that do the same elsewhere."""

import contextlib
import os
import pathlib
import random
import subprocess
import sys

import botocore.session
import seaweed
from support.names import directory_of

from lazysnap.levels.s3 import S3Storage
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.threads import in_threads
from lazysnap.shard.checksum import BLOCK_BYTES, block_ranges

MIB = 1 << 20
DIRECTORY = directory_of(1)
SHARD = f"{DIRECTORY}/node-00000-of-00001.safetensors"
SIZE = 18_000_000
"""Two parts."""


def abandoned_after(seconds: float, storage):
    """A storage for which objects and uploads without a writer are abandoned that soon."""
    storage.abandoned_after_s = seconds
    return storage


def pattern(size: int, seed: int = 0) -> memoryview:
    return memoryview(random.Random(seed).randbytes(size))


def blocks(data: memoryview) -> list[tuple[int, memoryview]]:
    """As the store hands them on: the last one reaches up to the next page, with garbage."""
    found = []
    for offset, length in block_ranges(len(data)):
        room = map_anonymous(-(-length // 4096) * 4096)
        room[:length] = data[offset : offset + length]
        room[length:] = b"\xee" * (len(room) - length)
        found.append((offset, room))
    return found


def fill(storage, writer, data) -> None:
    tasks = ((lambda offset=offset, block=block: writer.write(offset, block)) for offset, block in blocks(data))
    in_threads(tasks, storage.parallel_writes, "test")


def upload(storage, data, path: str = SHARD) -> None:
    with contextlib.closing(storage.create(path, len(data))) as writer:
        fill(storage, writer, data)
        writer.publish()


def download(storage, path: str = SHARD) -> memoryview:
    out = map_anonymous(storage.size(path))
    with contextlib.closing(storage.reader(path)) as reader:
        for offset in range(0, len(out), BLOCK_BYTES):
            reader.read_into(offset, out[offset : offset + BLOCK_BYTES])
    return out


def through(proxy, server, url: str):
    """A storage whose requests pass the proxy, and which has learnt already what the server can do."""
    storage = S3Storage(url, server.options(endpoint=proxy.endpoint))
    assert storage.checks_writes()
    proxy.requests.clear()
    return storage


def uploads_at(server, url: str) -> list[str]:
    """The keys below the level of uploads that nobody completed."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    found = client_of(server).list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", [])
    return [one["Key"].removeprefix(f"{prefix}/") for one in found]


def begin_upload(server, url: str, path: str) -> None:
    """As another program does it (``aws s3 cp``)."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client_of(server).create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{path}")


def client_of(server):
    options = server.options()
    keys = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
    session = botocore.session.Session()
    return session.create_client("s3", endpoint_url=server.endpoint, region_name="us-east-1", **keys)


def operations(proxy) -> list[str]:
    return [request.operation for request in proxy.requests]


CHILD = """
import sys
sys.path[:0] = [{here!r}, {servers!r}, {tests!r}]
from s3_work import *
storage = S3Storage({url!r}, {options!r})
def say(text):
    print(text, flush=True)
def wait():
    sys.stdin.readline()
{code}
"""


@contextlib.contextmanager
def child(url: str, options: dict, code: str):
    """A process with a client of its own; it ends with the block."""
    here = str(pathlib.Path(__file__).parent)
    servers = str(pathlib.Path(seaweed.__file__).parent)
    tests = str(pathlib.Path(__file__).parents[1])
    text = CHILD.format(here=here, servers=servers, tests=tests, url=url, options=options, code=code)
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def next_line(process) -> str:
    line = process.stdout.readline()
    assert line, f"the child ended with {process.wait(60)}"
    return line.strip()
