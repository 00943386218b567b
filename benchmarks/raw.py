"""Raw limits, measured beside every figure: memory copies, pages of memory, direct writes, a plain S3 client.

The sides of a comparison (``Copies`` and those after it) have ``write(number)`` and ``read()``: each write makes a file
of a new name, each read gets the last one.
"""

import contextlib
import functools
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.workers import Line, processes

BLOCK = 16 << 20
FILE_THREADS = 2
S3_THREADS = 4
KEEP_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}
"""Makes the C library keep memory that was freed, and hand it out again with its pages in place: a virtual machine gets
each page from its host at the first touch, which may take ten times as long as to copy it."""


@contextlib.contextmanager
def peak_memory(run: str, interval_s: float) -> Iterator[list[int]]:
    """The greatest sum of PSS over a run's processes, sampled; page cache is not in it."""
    import psutil

    peak = [0]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(interval_s):
            total = 0
            for process in processes(run):
                with contextlib.suppress(psutil.Error):  # gone meanwhile
                    total += process.memory_full_info().pss
            peak[0] = max(peak[0], total)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sample)
        try:
            yield peak
        finally:
            over.set()


def slot_bytes() -> int:
    """Return the bytes of shared memory, and of files without a name, whose descriptors this process holds: slots."""
    sizes = {}
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            name = os.readlink(entry.path)
            if name.startswith("/memfd:") or name.endswith(" (deleted)"):
                status = os.stat(entry.path)
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def populate_s(size: int) -> float:
    """Seconds until so much new shared memory has all its pages, by one thread and one call of the kernel."""
    with mmap.mmap(-1, size) as room:
        return timed(functools.partial(room.madvise, 23))  # MADV_POPULATE_WRITE


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def warm_s(work: Callable[[], object], threads: int = 0) -> float:
    """Seconds of a call on one of several threads of torch, the mean of five; what a GPU does for it is waited for."""
    import torch
    from torch.utils.benchmark import Timer

    return Timer("work()", globals={"work": work}, num_threads=threads or torch.get_num_threads()).timeit(5).median


def memcpy_s(size: int, threads: int) -> float:
    import torch

    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    return warm_s(functools.partial(target.copy_, source), threads)


def limits(job: Line) -> Iterator[Line]:
    """A worker: what this machine can do at best, in ``directory``, with ``size`` bytes."""
    size = job["size"]
    for threads in (1, job["threads"]):
        name = f"memcpy, {threads} thread{'s' * (threads > 1)}"
        yield {"measure": "limit", "limit": name, "gb_per_s": size / memcpy_s(size, threads) / 1e9}
    with contextlib.suppress(OSError):  # this file system has no direct writes
        side = DirectFile(Path(job["directory"]), warm(size))
        seconds = []
        for number in range(4):
            seconds.append(timed(functools.partial(side.write, number)))
        yield {"measure": "limit", "limit": "O_DIRECT", "gb_per_s": size / statistics.median(seconds[1:]) / 1e9}


def warm(size: int) -> memoryview:
    """Page-aligned memory with all its pages in place, full of bytes that no disk or network can squeeze."""
    view = memoryview(mmap.mmap(-1, size))
    for start in range(0, size, 1 << 20):
        view[start : start + (1 << 20)] = os.urandom(min(1 << 20, size - start))
    return view


# ------------------------------------------------------------------------------------------------ sides


def _in_blocks(threads: int, work: Callable[[int, int], Any], size: int) -> list[Any]:
    """``work(offset, end)`` for each block from some threads; results in order."""
    results = []
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, size, BLOCK):
            results.append(pool.submit(work, start, min(start + BLOCK, size)))
        return [result.result() for result in results]


class Copies:
    """One thread copies between a warm tensor and populated shared memory: two areas by turns, as the engine has."""

    def __init__(self, size: int) -> None:
        import torch

        self._tensor = torch.ones(size, dtype=torch.uint8)
        self._areas = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).zero_() for _ in range(2)]

    def write(self, number: int) -> None:
        self._areas[number % 2].copy_(self._tensor)

    def read(self) -> None:
        self._tensor.copy_(self._areas[0])


class DirectFile:
    """As ``dd`` with two threads: allocate, O_DIRECT, fdatasync; O_DIRECT reads."""

    flags = os.O_DIRECT

    def __init__(self, directory: Path, image: memoryview) -> None:
        """What is read goes to ``image``, too."""
        self._directory = directory
        self._image = image
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "none"

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        """Nothing stays in this kernel's page cache."""
        handle = os.open(self._path, flags | self.flags, 0o600)
        try:
            yield handle
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    def write(self, number: int) -> None:
        """Durable on return."""
        path_before = self._path
        self._path = self._directory / f"raw-{type(self).__name__}-{number}"
        with self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL) as handle:
            with contextlib.suppress(OSError):  # where our writer goes without as well
                os.posix_fallocate(handle, 0, len(self._image))
            self._move(lambda start, end: os.pwrite(handle, self._image[start:end], start))
            os.fdatasync(handle)
        path_before.unlink(missing_ok=True)

    def read(self) -> None:
        """Into warm memory."""
        with self._open(os.O_RDONLY) as handle:
            self._move(lambda start, end: os.preadv(handle, [self._image[start:end]], start))

    def _move(self, work: Callable[[int, int], int]) -> None:
        if sum(_in_blocks(FILE_THREADS, work, len(self._image))) != len(self._image):
            raise OSError("the kernel moved only a part of a block")


class BufferedFile(DirectFile):
    """The same through the page cache, which keeps nothing for a read."""

    flags = 0


class S3Client:
    """botocore, the client below boto3: multipart uploads and ranged downloads; signs no bytes and sums none."""

    def __init__(self, options: Line, bucket: str, image: memoryview) -> None:
        import botocore.session
        from botocore.config import Config

        self._place = {"Bucket": bucket}
        self._image = image
        config = Config(
            max_pool_connections=S3_THREADS,
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False, "addressing_style": "path"},
        )
        keys = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
        endpoint = {"endpoint_url": options["endpoint_url"], **options["client_kwargs"]}
        self._client = botocore.session.get_session().create_client("s3", config=config, **keys, **endpoint)

    def write(self, number: int) -> None:
        """Visible on return."""
        if "Key" in self._place:
            self._client.delete_object(**self._place)
        self._place["Key"] = f"raw/{number}"
        upload = {**self._place, "UploadId": self._client.create_multipart_upload(**self._place)["UploadId"]}

        def part(start: int, end: int) -> Line:
            facts = {"PartNumber": start // BLOCK + 1}
            answer = self._client.upload_part(Body=bytes(self._image[start:end]), **facts, **upload)
            return {**facts, "ETag": answer["ETag"]}

        parts = _in_blocks(S3_THREADS, part, len(self._image))
        self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)

    def read(self) -> None:
        def part(start: int, end: int) -> None:
            body = self._client.get_object(Range=f"bytes={start}-{end - 1}", **self._place)["Body"]
            while start < end:
                count = body.readinto(self._image[start:end])
                if not count:
                    raise EOFError(f"the object ends at {start}")
                start += count

        _in_blocks(S3_THREADS, part, len(self._image))
