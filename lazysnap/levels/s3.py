"""An S3 bucket as a place for snapshots, through botocore. Parts are sent straight from the memory given."""

import base64
import contextlib
import logging
import threading
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from awscrt.checksums import crc32c

from lazysnap.errors import LevelError, LevelUnavailable, ShardCorrupt
from lazysnap.levels.leftovers import is_node_file_path
from lazysnap.levels.s3_client import PATIENCE_S, STALL_S, S3Client
from lazysnap.levels.s3_errors import Failure, Kind
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.storage import MAX_SMALL_BYTES, SETTLED, Storage, is_probe, probe_name
from lazysnap.shard.checksum import BLOCK_BYTES

logger = logging.getLogger(__name__)

_compares_checksums: dict[tuple[str, str], bool] = {}
"""By endpoint and bucket: whether the server refuses a part whose CRC32C is wrong. Tried once per process."""
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


class S3Reader:
    """Ranges of one version of an object, also if it is replaced meanwhile; see ``levels.storage.Reader``."""

    def __init__(self, client: S3Client, path: str) -> None:
        """Raises: LevelError, FileNotFoundError."""
        self._client = client
        self._path = path
        self._etag = str(client.head(path).get("ETag", ""))

    def read_into(self, offset: int, out: memoryview) -> None:
        """Receive one range."""
        if not len(out):
            return
        where = f"{self._client.url}/{self._path}"
        try:
            done = self._client.receive(self._path, offset, out, self._etag)
        except Failure as failure:
            raise ShardCorrupt(f"{where}: it was replaced while it was read") from failure
        if done < len(out):
            raise ShardCorrupt(f"{where}: ends after {offset + done} bytes, expected {offset + len(out)}")

    def close(self) -> None:
        """Nothing is open."""


class S3Storage(Storage):
    """See ``levels.storage.Storage``."""

    parallel_writes = 4
    parallel_reads = 4

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        patience_s: float = PATIENCE_S,
        stall_s: float = STALL_S,
    ) -> None:
        """Makes no request. Raises: LevelUnavailable."""
        self.url = url
        self.client = S3Client(url, options or {}, patience_s, stall_s)

    def __repr__(self) -> str:
        return f"S3Storage({self.client.shown_url!r})"

    # ---------------------------------------------------------------- checksums

    def compares_checksums(self) -> bool:
        """Whether the server notices a part that arrived damaged; the first time tries it out. Raises: LevelError."""
        place = self.client.endpoint, self.client.bucket
        found = _compares_checksums.get(place)
        if found is None:
            found = _compares_checksums[place] = self._try_checksums()
            if not found:
                logger.warning(
                    "%s: the server does not notice damaged parts; snapshots are read back to verify them",
                    self.client.shown_url,
                )
        return found

    @property
    def checks_writes(self) -> bool:
        """See ``Storage.checks_writes``; False where it cannot be tried out."""
        try:
            return self.compares_checksums()
        except LevelError:
            return False

    def _try_checksums(self) -> bool:
        """Whether a part is refused if its checksum is that of other bytes, and taken if it is its own."""
        what, key = "trying the bucket out", self.client.key(probe_name())
        refusals = (Kind.DAMAGED, Kind.OTHER)

        def is_taken(upload: str, checksum: dict[str, str]) -> bool:
            part: dict[str, Any] = {"Key": key, "UploadId": upload, "PartNumber": 1, "Body": b"probe", **checksum}
            try:
                self.client.call(what, "upload_part", keep=refusals, **part)
            except Failure:
                return False
            return True

        try:
            answer = self.client.call(
                what, "create_multipart_upload", keep=refusals, Key=key, ChecksumAlgorithm="CRC32C"
            )
            upload = answer["UploadId"]
        except Failure:
            return False
        try:
            return not is_taken(upload, checksum_of(b"other bytes")) and is_taken(upload, checksum_of(b"probe"))
        finally:
            self.client.abort(key, upload)

    # ---------------------------------------------------------------- writing and reading

    def create(self, path: str, size_bytes: int) -> S3Writer:
        """Start an upload."""
        return S3Writer(self.client, path, size_bytes, has_checksums=self.compares_checksums())

    def put(self, path: str, data: bytes) -> None:
        """Put a small object by one request."""
        known = _compares_checksums.get((self.client.endpoint, self.client.bucket), False)
        self.client.put(path, data, **(checksum_of(data) if known else {}))

    def get(self, path: str) -> bytes:
        """Get a small object."""
        data = self.client.receive_all(path, MAX_SMALL_BYTES)
        if data is None:
            raise ShardCorrupt(f"{self.url}/{path}: a manifest has at most {MAX_SMALL_BYTES} bytes")
        return data

    def reader(self, path: str) -> S3Reader:
        """Find out the version of an object."""
        return S3Reader(self.client, path)

    def size(self, path: str) -> int:
        """Bytes of an object."""
        return int(self.client.head(path)["ContentLength"])

    def stamp(self, path: str) -> object:
        """Tag, time and size."""
        facts = self.client.head(path)
        return facts.get("ETag"), str(facts.get("LastModified")), facts["ContentLength"]

    def age_s(self, path: str) -> float | None:
        """See ``Storage.age_s``."""
        facts = self.client.head(path)
        return _age_s(facts, facts.get("LastModified"))

    # ---------------------------------------------------------------- deleting

    def delete(self, path: str) -> None:
        """Delete an object."""
        self.client.delete(path)

    def delete_directory(self, path: str) -> None:
        """Directories exist while objects do; some servers keep an empty object with the directory's name."""
        marker = self.client.key(f"{path}/" if path else "")
        if not marker:
            return
        try:
            answer = self.client.call(f"listing {path}", "list_objects_v2", Prefix=marker, Delimiter="/", MaxKeys=2)
            if [one["Key"] for one in answer.get("Contents", ())] == [marker] and not answer.get("CommonPrefixes"):
                self.client.call(f"deleting {path}", "delete_object", Key=marker)
        except (LevelError, FileNotFoundError) as error:
            logger.debug("a directory stays: %s", error)

    def abort_stale(self) -> list[str]:
        """See ``Storage.abort_stale``. Foreign uploads below the prefix stay, and any that began within a day."""
        gone: list[str] = []
        for key, upload, age_s in self._uploads(self.client.key("")):
            inner = key[len(self.client.key("")) :]
            if age_s >= SETTLED * self.abandoned_after_s and (is_node_file_path(inner) or is_probe(inner)):
                self.client.abort(key, upload)
                gone.append(inner)
        return gone

    def _uploads(self, prefix: str) -> list[tuple[str, str, float]]:
        """Key, id and age in seconds; 0 where the server does not say."""
        found: list[tuple[str, str, float]] = []
        markers: dict[str, Any] = {}
        while True:
            facts: dict[str, Any] = {"Prefix": prefix, **markers}
            keep = (Kind.REFUSED, Kind.OTHER)
            try:
                answer = self.client.call("listing uploads", "list_multipart_uploads", keep=keep, **facts)
            except Failure as failure:
                # Unfinished uploads cost money, but harm no snapshot: a missing right must not stop the sweep.
                logger.warning(
                    "%s: unfinished uploads cannot be listed (%s); let a lifecycle rule abort them",
                    self.client.shown_url,
                    failure.code,
                )
                return found
            uploads = answer.get("Uploads", ())
            found += [(one["Key"], one["UploadId"], _age_s(answer, one.get("Initiated")) or 0.0) for one in uploads]
            if not answer.get("IsTruncated"):
                return found
            markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer.get("NextUploadIdMarker", "")}

    # The last one: it hides the type from the annotations behind it.
    def list(self, path: str = "", prefix: str = "") -> list[str]:
        """Names below a prefix."""
        folder = self.client.key(path + "/" if path else "")
        names: set[str] = set()
        token: dict[str, Any] = {}
        while True:
            facts: dict[str, Any] = {"Prefix": folder + prefix, "Delimiter": "/", **token}
            answer = self.client.call(f"listing {path or '.'}", "list_objects_v2", **facts)
            found = [one["Key"] for one in answer.get("Contents", ())]
            found += [one["Prefix"] for one in answer.get("CommonPrefixes", ())]
            names.update(name[len(folder) :].rstrip("/") for name in found)
            if not answer.get("IsTruncated"):
                return sorted(names - {""})
            token = {"ContinuationToken": answer["NextContinuationToken"]}


def _age_s(answer: Mapping[str, Any], since: datetime | None) -> float | None:
    """Seconds from ``since`` to an answer, by the server's clock; ``None`` where the server does not say."""
    try:
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, ValueError, TypeError):
        return None
    return None if since is None else (now - since).total_seconds()
