"""One object that is uploaded to S3 in parts, each straight from the memory that it is written from."""

import base64
import contextlib
import hashlib
import threading
import zlib
from typing import TYPE_CHECKING, Any

from lazysnap import faults
from lazysnap.errors import LevelError, LevelUnavailable, ShardCorrupt
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.s3errors import Failure, Kind
from lazysnap.levels.storage import level_error
from lazysnap.shard.checksum import BLOCK_BYTES

if TYPE_CHECKING:
    from lazysnap.levels.s3 import S3Storage

SINGLE_BELOW = 5 << 20
"""S3 refuses smaller parts, except for the last."""
MAX_PARTS = 10_000


def part_bytes(size_bytes: int, max_parts: int = MAX_PARTS) -> int:
    """The size of a part: one block, or as many as it takes to get along with ``max_parts``."""
    blocks = -(-size_bytes // BLOCK_BYTES)
    return max(1, -(-blocks // max_parts)) * BLOCK_BYTES


def checksum_arguments(algorithm: str | None, data: memoryview) -> dict[str, Any]:
    """Arguments of a request by which the server can tell that the bytes arrived."""
    if algorithm == "crc32":
        return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}
    if algorithm == "md5":
        return {"ContentMD5": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}
    return {}


class PartWriter:
    """See ``levels.storage.Writer``. The object shows when all is uploaded, not before.

    A write that is just one part is sent from the memory given; others are collected into parts first.
    """

    def __init__(self, storage: "S3Storage", path: str, size_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._key = storage.key(path)
        self._size = size_bytes
        self._part = part_bytes(size_bytes, storage.max_parts) if size_bytes >= SINGLE_BELOW else max(1, size_bytes)
        self._lock = threading.Lock()
        self._collected: dict[int, tuple[memoryview, int]] = {}
        """By number of the part: room for it, and how much of it is there."""
        self._parts: dict[int, dict[str, Any]] = {}
        self._whole = b""
        self._upload = ""
        self._is_published = self._is_closed = False
        try:
            self._algorithm = storage.abilities().checksum
            if size_bytes >= SINGLE_BELOW:
                arguments: dict[str, Any] = {"ChecksumAlgorithm": "CRC32"} if self._algorithm == "crc32" else {}
                self._reach("create")
                answer = storage.client.call(f"starting {path}", "create_multipart_upload", Key=self._key, **arguments)
                self._upload = answer["UploadId"]
        except BaseException:
            self.close()
            raise

    def _reach(self, point: str) -> None:
        try:
            faults.point(f"level.s3.{point}")
        except OSError as error:
            raise level_error(self._storage.url, f"{point} {self._path}", error) from error

    # ---------------------------------------------------------------- parts

    def write(self, offset: int, data: memoryview) -> None:
        """Upload what is a whole part, keep the rest until the other bytes of its part are there."""
        data = data[: max(0, self._size - offset)]
        while len(data):
            number, start = divmod(offset, self._part)
            length = min(self._part, self._size - number * self._part)
            piece = data[: length - start]
            if len(piece) == length:
                self._send(number, piece)
            else:
                self._collect(number, start, piece, length)
            offset, data = offset + len(piece), data[len(piece) :]

    def _collect(self, number: int, start: int, piece: memoryview, length: int) -> None:
        with self._lock:
            room, _ = self._collected.setdefault(number, (map_anonymous(length), 0))
        room[start : start + len(piece)] = piece
        with self._lock:
            done = self._collected[number][1] + len(piece)
            self._collected[number] = room, done
            if done < length:
                return
            del self._collected[number]
        self._send(number, room)

    def _send(self, number: int, piece: memoryview) -> None:
        self._reach("part")
        if not self._upload:
            self._whole = bytes(piece)
            self._parts[number] = {}
            return
        checksum = checksum_arguments(self._algorithm, piece)
        answer = self._storage.client.send(
            f"writing part {number + 1} of {self._path}",
            "upload_part",
            piece,
            Key=self._key,
            UploadId=self._upload,
            PartNumber=number + 1,
            **checksum,
        )
        named = {name: value for name, value in checksum.items() if name == "ChecksumCRC32"}
        self._parts[number] = {"PartNumber": number + 1, "ETag": answer["ETag"], **named}

    # ---------------------------------------------------------------- the end

    def publish(self) -> None:
        """Complete the upload; the object shows whole, or not at all."""
        missing = -(-self._size // self._part) - len(self._parts)
        if missing:
            raise ShardCorrupt(f"{self._storage.url}/{self._path}: {missing} parts of it were not written")
        self._reach("complete")
        if self._upload:
            self._complete()
        else:
            self._storage.put(self._path, self._whole)
        self._reach("completed")
        size = self._storage.size(self._path)
        if size != self._size:
            self._storage.delete(self._path)
            raise LevelUnavailable(f"{self._storage.url}/{self._path}: {size} bytes arrived, {self._size} were sent")
        self._is_published = True

    def _complete(self) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        try:
            self._storage.client.call(
                f"completing {self._path}",
                "complete_multipart_upload",
                keep=(Kind.NO_UPLOAD,),
                Key=self._key,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
            )
        except Failure as failure:
            # An earlier attempt may have done it, and its answer was lost: then the object is there.
            if not self._storage.exists(self._path):
                raise LevelUnavailable(f"{self._storage.url}/{self._path}: the upload is gone ({failure})") from failure

    def close(self) -> None:
        """Abort what is not published; harmless twice. What may show under the name stays: it is whole."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._upload and not self._is_published:
            with self._storage.client.hurry(), contextlib.suppress(LevelError, FileNotFoundError):
                self._storage.abort(self._key, self._upload)
