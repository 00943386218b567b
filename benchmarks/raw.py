"""Raw limits, measured beside every figure: memory copies, pages of memory, direct writes, a plain S3 client.

The sides of a comparison (``DirectFile`` and those after it) have ``write(number)`` and ``read()``: each write makes a
file of a new name, each read gets the last one.
"""

import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.frame import Line, processes

BLOCK = 16 << 20
FILE_THREADS = 2
S3_THREADS = 4
KEEP_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}
"""Makes the C library keep memory that was freed, and hand it out again with its pages in place: a virtual machine gets
each page from its host at the first touch, which may take ten times as long as to copy it."""


# ------------------------------------------------------------------------------------------------ memory


class PeakMemory:
    """Samples the sum of PSS over a run's processes in a thread: a page that n of them map counts 1/n in each.

    Page cache is not in it.
    """

    def __init__(self, run: str, interval_s: float) -> None:
        self.peak_bytes, self._run, self._interval_s = 0, run, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, sum(map(_proportional_bytes, processes(self._run))))

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(30)
        return self.peak_bytes


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # gone meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def slot_bytes() -> int:
    """Shared memory whose descriptors this process holds: the slots."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(entry.path).startswith("/memfd:"):
                facts = os.stat(entry.path)
                found[facts.st_ino] = facts.st_blocks * 512
        except OSError:  # the descriptor of the listing itself
            continue
    return sum(found.values())


def populate_s(size: int) -> float:
    """Seconds until so much new shared memory has all its pages, by one thread and one call of the kernel."""
    handle = os.memfd_create("raw")
    try:
        os.ftruncate(handle, size)
        with mmap.mmap(handle, size) as room:
            started = time.perf_counter()
            room.madvise(23)  # MADV_POPULATE_WRITE
            return time.perf_counter() - started
    finally:
        os.close(handle)


def memcpy_rate(size: int, threads: int) -> float:
    """Bytes per second between two warm buffers, the median of five copies."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    seconds = [_timed(lambda: target.copy_(source)) for _ in range(6)]
    torch.set_num_threads(before)
    return size / statistics.median(seconds[1:])


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def limits(settings: Line) -> Iterator[Line]:
    """A worker: what this machine can do at best, in bytes per second; ``directory``, ``size``."""
    import torch

    size, direct = settings["size"], None
    for name, threads in (("memcpy_1_thread", 1), ("memcpy_all_threads", torch.get_num_threads())):
        yield {"measure": "limit", "name": name, "bytes_per_s": memcpy_rate(size, threads)}
    try:
        side = DirectFile(Path(settings["directory"]), warm(size), None)
        direct = size / statistics.median([_timed(lambda n=n: side.write(n)) for n in range(4)][1:])
        side.delete()
    except OSError:  # this file system has no direct writes
        pass
    yield {"measure": "limit", "name": "o_direct", "bytes_per_s": direct}


def warm(size: int) -> memoryview:
    """Page-aligned memory with all its pages in place, full of bytes that no disk or network can squeeze."""
    view = memoryview(mmap.mmap(-1, size))
    for start in range(0, size, 1 << 20):
        view[start : start + (1 << 20)] = os.urandom(min(1 << 20, size - start))
    return view


# ------------------------------------------------------------------------------------------------ sides


def _in_blocks(threads: int, work: Callable[[int, int], Any], size: int) -> list[Any]:
    """``work(offset, end)`` for each block from some threads; results in order."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda start: work(start, min(start + BLOCK, size)), range(0, size, BLOCK)))


class Copies:
    """One thread copies between warm tensors and populated shared memory: two areas by turns, as the engine has."""

    def __init__(self, tensors: list[Any]) -> None:
        import torch

        self._tensors, size = tensors, sum(tensor.nbytes for tensor in tensors)
        self._areas = []
        for _ in range(2):
            area = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).zero_()
            parts = area.split([tensor.nbytes for tensor in tensors])
            self._areas.append([part.view(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)])

    def write(self, number: int) -> None:
        for area, tensor in zip(self._areas[number % 2], self._tensors, strict=True):
            area.copy_(tensor)

    def read(self) -> None:
        for area, tensor in zip(self._areas[0], self._tensors, strict=True):
            tensor.copy_(area)

    def delete(self) -> None:
        """Nothing to do."""


class DirectFile:
    """As ``dd`` with two threads: allocate, O_DIRECT, fdatasync; O_DIRECT reads."""

    flags = os.O_DIRECT

    def __init__(self, directory: Path, image: memoryview, out: memoryview | None) -> None:
        self._directory, self._image, self._out = directory, image, out
        directory.mkdir(parents=True, exist_ok=True)
        self._path: Path | None = None

    def write(self, number: int) -> None:
        """Durable on return."""
        previous, self._path = self._path, self._directory / f"raw-{type(self).__name__}-{number}"
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | self.flags, 0o600)
        try:
            with contextlib.suppress(OSError):  # where our writer goes without as well
                os.posix_fallocate(handle, 0, len(self._image))
            _in_blocks(FILE_THREADS, lambda *span: self._write_all(handle, *span), len(self._image))
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        if previous is not None:
            previous.unlink()

    def _write_all(self, handle: int, start: int, end: int) -> None:
        while start < end:
            start += os.pwrite(handle, self._image[start:end], start)

    def read(self) -> None:
        """Into warm memory; nothing comes from this kernel's page cache."""
        assert self._path is not None
        handle = os.open(self._path, os.O_RDONLY | self.flags)
        try:
            _in_blocks(FILE_THREADS, lambda *span: self._read_all(handle, *span), len(self._image))
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    def _read_all(self, handle: int, start: int, end: int) -> None:
        assert self._out is not None
        while start < end:
            count = os.preadv(handle, [self._out[start:end]], start)
            if not count:
                raise EOFError(f"the file ends at {start}")
            start += count

    def delete(self) -> None:
        if self._path is not None:
            self._path.unlink()


class BufferedFile(DirectFile):
    """The same through the page cache, which keeps nothing for a read."""

    flags = 0


class S3Client:
    """botocore, the client below boto3: multipart uploads and ranged downloads; signs no bytes and sums none."""

    def __init__(self, options: Line, bucket: str, image: memoryview, out: memoryview) -> None:
        import botocore.session
        from botocore.config import Config

        self._place, self._image, self._out = {"Bucket": bucket}, image, out
        self._client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
            region_name=options["client_kwargs"]["region_name"],
            config=Config(
                max_pool_connections=S3_THREADS,
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"payload_signing_enabled": False, "addressing_style": "path"},
            ),
        )

    def write(self, number: int) -> None:
        """Visible on return."""
        self.delete()
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
                count = body.readinto(self._out[start:end])
                if not count:
                    raise EOFError(f"the object ends at {start}")
                start += count

        _in_blocks(S3_THREADS, part, len(self._image))

    def delete(self) -> None:
        if "Key" in self._place:
            self._client.delete_object(**self._place)
