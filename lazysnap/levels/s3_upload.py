"""One object that is uploaded to S3 in parts, each straight from the memory that it is written from."""

import base64
import contextlib
import threading
from typing import Any

from awscrt.checksums import crc32c

from lazysnap.errors import LevelError, LevelUnavailable, ShardCorrupt
from lazysnap.levels.s3_client import S3Client
from lazysnap.levels.s3_errors import Failure, Kind
from lazysnap.levels.source import map_anonymous
from lazysnap.shard.checksum import BLOCK_BYTES

SINGLE_BELOW = 5 << 20
"""S3 refuses smaller parts, except for the last."""
MAX_PARTS = 10_000


def part_bytes(size_bytes: int) -> int:
    """The size of a part: one block, or as many as ``MAX_PARTS`` requires."""
    blocks = -(-size_bytes // BLOCK_BYTES)
    return max(1, -(-blocks // MAX_PARTS)) * BLOCK_BYTES


def checksum_of(data: bytes | memoryview) -> dict[str, str]:
    """Argument of a request by which the server can tell that the bytes arrived undamaged."""
    return {"ChecksumCRC32C": base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()}


class S3Writer:
    """See ``levels.storage.Writer``. The object becomes visible when all parts are there.

    A block that is one part is sent from the memory given. Other blocks are collected into parts first.
    """

    def __init__(self, client: S3Client, path: str, size_bytes: int, *, has_checksums: bool) -> None:
        """``has_checksums``: whether the server compares them. One that does not may refuse them."""
        self._client = client
        self._path = path
        self._key = client.key(path)
        self._where = f"{client.url}/{path}"
        self._size = size_bytes
        self._has_checksums = has_checksums
        self._part = part_bytes(size_bytes) if size_bytes >= SINGLE_BELOW else max(1, size_bytes)
        self._lock = threading.Lock()
        self._collected: dict[int, tuple[memoryview, int]] = {}
        """By number of the part: its memory, and how much of it is filled."""
        self._parts: dict[int, dict[str, Any]] = {}
        self._whole = b""
        self._upload = ""
        self._is_published = self._is_closed = False
        if size_bytes >= SINGLE_BELOW:
            client.reach("create", path)
            algorithm: dict[str, Any] = {"ChecksumAlgorithm": "CRC32C"} if has_checksums else {}
            answer = client.call(f"starting {path}", "create_multipart_upload", Key=self._key, **algorithm)
            self._upload = answer["UploadId"]

    # ---------------------------------------------------------------- parts

    def write(self, offset: int, data: memoryview) -> None:
        """Upload what is a whole part; keep the rest until the other bytes of its part are there."""
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

    def _checksum(self, data: bytes | memoryview) -> dict[str, str]:
        return checksum_of(data) if self._has_checksums else {}

    def _send(self, number: int, piece: memoryview) -> None:
        self._client.reach("part", self._path)
        if not self._upload:
            self._whole = bytes(piece)
            self._parts[number] = {}
            return
        what = f"writing part {number + 1} of {self._path}"
        facts: dict[str, Any] = {"PartNumber": number + 1, **self._checksum(piece)}
        answer = self._client.call(what, "upload_part", Key=self._key, UploadId=self._upload, Body=piece, **facts)
        self._parts[number] = {"ETag": answer["ETag"], **facts}

    # ---------------------------------------------------------------- the end

    def publish(self) -> None:
        """Complete the upload; the object becomes visible whole, or not at all."""
        missing = -(-self._size // self._part) - len(self._parts)
        if missing:
            raise ShardCorrupt(f"{self._where}: {missing} parts of it were not written")
        self._client.reach("complete", self._path)
        if self._upload:
            self._complete()
        else:
            self._client.put(self._path, self._whole, **self._checksum(self._whole))
        self._client.reach("completed", self._path)
        size = int(self._client.head(self._path)["ContentLength"])
        if size != self._size:
            self._client.delete(self._path)
            raise LevelUnavailable(f"{self._where}: {size} bytes arrived, {self._size} were sent")
        self._is_published = True

    def _complete(self) -> None:
        what = f"completing {self._path}"
        parts = {"Parts": [self._parts[number] for number in sorted(self._parts)]}
        facts: dict[str, Any] = {"Key": self._key, "UploadId": self._upload, "MultipartUpload": parts}
        try:
            self._client.call(what, "complete_multipart_upload", keep=(Kind.NO_UPLOAD,), **facts)
        except Failure as failure:
            # An earlier attempt may have completed it, and its answer was lost. Then the object is there.
            try:
                self._client.head(self._path)
            except FileNotFoundError:
                raise LevelUnavailable(f"{self._where}: the upload is gone ({failure})") from failure

    def close(self) -> None:
        """Abort what is not published; harmless twice. An object that is visible under the name stays: it is whole."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._upload and not self._is_published:
            with contextlib.suppress(LevelError, FileNotFoundError):
                self._client.abort(self._key, self._upload, patience_s=0.0)
