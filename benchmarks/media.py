"""Raw limits of the media that levels live on: the same bytes with the same blocks and threads, and nothing else.

Every class here, and ``rates.Ours``, has ``write(number)``, ``read(number)`` and ``delete(number)``; ``number`` makes a
name that was never used before. No torch here: this also runs in a small guest.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 16 << 20
PAGE = 4096


def spans(size: int) -> Iterator[tuple[int, int]]:
    """``(offset, end)`` of each block."""
    for offset in range(0, size, BLOCK):
        yield offset, min(offset + BLOCK, size)


def in_threads(count: int, work: Callable[[int, int], object], size: int) -> list[Any]:
    """``work(offset, end)`` for each block from ``count`` threads; results in order."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda span: work(*span), spans(size)))


class DirectFile:
    """As ``dd`` with several threads: allocate, O_DIRECT, fdatasync; O_DIRECT reads."""

    flags = os.O_DIRECT

    def __init__(self, directory: Path, threads: int, image: memoryview, out: memoryview) -> None:
        self._directory, self._threads, self._image, self._out = directory, threads, image, out
        directory.mkdir(parents=True, exist_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"raw-{type(self).__name__}-{number}"

    def write(self, number: int) -> None:
        """Durable on return."""
        handle = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.flags, 0o600)
        try:
            allocate(handle, len(self._image))
            in_threads(
                self._threads, lambda start, end: write_all(handle, self._image[start:end], start), len(self._image)
            )
            os.fdatasync(handle)
        finally:
            os.close(handle)

    def read(self, number: int) -> None:
        """Into warm memory; nothing comes from this kernel's page cache."""
        handle = os.open(self._path(number), os.O_RDONLY | self.flags)
        try:
            in_threads(
                self._threads, lambda start, end: read_all(handle, self._out[start:end], start), len(self._image)
            )
        finally:
            os.close(handle)

    def delete(self, number: int) -> None:
        """The deletion is not left for a later measurement to pay."""
        self._path(number).unlink()
        os.sync()


class BufferedFile(DirectFile):
    """The same through the page cache, with fdatasync; dropped from the cache before it is read."""

    flags = 0

    def read(self, number: int) -> None:
        handle = os.open(self._path(number), os.O_RDONLY)
        try:
            in_threads(
                self._threads, lambda start, end: read_all(handle, self._out[start:end], start), len(self._image)
            )
        finally:
            os.close(handle)

    def write(self, number: int) -> None:
        super().write(number)
        handle = os.open(self._path(number), os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def allocate(handle: int, size: int) -> None:
    """Reserve the room as our writer does, where the file system can."""
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError:  # then both go without
        return


def write_all(handle: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``."""
    while len(data):
        count = os.pwrite(handle, data, offset)
        offset, data = offset + count, data[count:]


def read_all(handle: int, out: memoryview, offset: int) -> None:
    """Fill ``out``."""
    while len(out):
        count = os.preadv(handle, [out], offset)
        if count == 0:
            raise EOFError(f"the file ends at {offset}")
        offset, out = offset + count, out[count:]


class S3Client:
    """botocore, the client below boto3: multipart uploads and ranged downloads; signs no bytes and sums none."""

    def __init__(self, options: dict[str, Any], bucket: str, threads: int, buffers: tuple[memoryview, memoryview]):
        import botocore.session
        from botocore.config import Config

        self._bucket, self._threads = bucket, threads
        self._image, self._out = buffers
        self._client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
            region_name=options["client_kwargs"]["region_name"],
            config=Config(
                max_pool_connections=threads,
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"payload_signing_enabled": False, "addressing_style": "path"},
            ),
        )

    def write(self, number: int) -> None:
        """Visible on return."""
        place = {"Bucket": self._bucket, "Key": f"raw/{number}"}
        upload = {**place, "UploadId": self._client.create_multipart_upload(**place)["UploadId"]}

        def part(start: int, end: int) -> dict[str, Any]:
            facts = {"PartNumber": start // BLOCK + 1}
            answer = self._client.upload_part(Body=bytes(self._image[start:end]), **facts, **upload)
            return {**facts, "ETag": answer["ETag"]}

        parts = in_threads(self._threads, part, len(self._image))
        self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)

    def read(self, number: int) -> None:
        """Ranges into warm memory."""

        def part(start: int, end: int) -> None:
            place = {"Bucket": self._bucket, "Key": f"raw/{number}"}
            body = self._client.get_object(Range=f"bytes={start}-{end - 1}", **place)["Body"]
            while start < end:
                count = body.readinto(self._out[start:end])
                if not count:
                    raise EOFError(f"the object ends at {start}")
                start += count

        in_threads(self._threads, part, len(self._image))

    def delete(self, number: int) -> None:
        """Gone for readers; the server frees the room when it likes."""
        self._client.delete_object(Bucket=self._bucket, Key=f"raw/{number}")
