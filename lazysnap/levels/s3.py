"""An S3 bucket as a place for snapshots, through s3fs: parts sent straight from memory."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from lazysnap import faults
from lazysnap.errors import LevelError, ShardCorrupt
from lazysnap.levels.leftovers import is_shard_path
from lazysnap.levels.multipart import MAX_PARTS, PartWriter, checksum_arguments
from lazysnap.levels.object_storage import ObjectStorage, is_probe, probe_name
from lazysnap.levels.s3client import PATIENCE_S, STALL_S, S3Client
from lazysnap.levels.s3errors import Failure, Kind
from lazysnap.levels.storage import ABANDONED_AFTER_S, MAX_SMALL_BYTES, SETTLED, level_error
from lazysnap.levels.workers import Workers

logger = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
"""Larger reads are split: several connections bring more than one."""
_RANGE_THREADS = 4


@dataclass(frozen=True)
class Abilities:
    """What a server was seen to do."""

    checksum: str | None
    """By which checksum it notices that a part arrived damaged: ``crc32``, ``md5``, or none."""


_abilities: dict[tuple[str, str], Abilities] = {}


class S3Reader:
    """Ranges of one object; of one version of it, even if it is replaced meanwhile."""

    def __init__(self, storage: "S3Storage", path: str) -> None:
        self._storage = storage
        self._path = path
        self._etag = ""
        self._first = threading.Lock()

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` by several requests at a time."""
        if not len(out):
            return
        spans = [(start, min(RANGE_BYTES, len(out) - start)) for start in range(0, len(out), RANGE_BYTES)]
        with self._first:
            if not self._etag:  # which version it is, the first answer tells
                start, length = spans.pop(0)
                self._etag = self._one(offset, out[start : start + length], "")
        Workers[str](min(_RANGE_THREADS, max(1, len(spans))), "lazysnap-range").run(
            lambda start=start, length=length: self._one(offset + start, out[start : start + length], self._etag)  # type: ignore[misc]
            for start, length in spans
        )

    def _one(self, offset: int, out: memoryview, etag: str) -> str:
        storage, path = self._storage, self._path
        try:
            done, etag = storage.client.receive(f"reading {path} at {offset}", storage.key(path), offset, out, etag)
        except Failure as failure:
            raise ShardCorrupt(f"{storage.url}/{path}: it was replaced while it was read") from failure
        if done < len(out):
            raise ShardCorrupt(f"{storage.url}/{path}: ends after {offset + done} bytes, expected {offset + len(out)}")
        return etag

    def close(self) -> None:
        """Nothing is open."""


class S3Storage(ObjectStorage):
    """See ``levels.storage.Storage``."""

    parallel_writes = 4
    parallel_reads = 4

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        abandoned_after_s: float | None = None,
        patience_s: float = PATIENCE_S,
        stall_s: float = STALL_S,
    ) -> None:
        """Makes no request. Raises: LevelUnavailable."""
        self.url = url
        self.abandoned_after_s = ABANDONED_AFTER_S if abandoned_after_s is None else abandoned_after_s
        self.max_parts = MAX_PARTS
        self._checks_writes: bool | None = None
        self.client = S3Client(url, options or {}, patience_s, stall_s)

    def __repr__(self) -> str:
        return f"S3Storage({self.client.redaction.clean(self.url)!r})"

    def key(self, path: str) -> str:
        """The object's key in the bucket."""
        return f"{self.client.root}/{path}" if self.client.root else path

    def _reach(self, point: str, path: str) -> None:
        try:
            faults.point(f"level.s3.{point}")
        except OSError as error:
            raise level_error(self.url, f"{point} {path}", error) from error

    # ---------------------------------------------------------------- what the server can do

    def abilities(self) -> Abilities:
        """Tried out once per server, bucket and process."""
        place = self.client.endpoint, self.client.bucket
        found = _abilities.get(place)
        if found is None:
            found = _abilities[place] = self._try_out()
            if found.checksum is None:
                logger.warning(
                    "%s: the server does not notice damaged parts: snapshots are read back to be sure",
                    self.client.redaction.clean(self.url),
                )
        return found

    @property
    def checks_writes(self) -> bool:
        """Whether the server was seen to notice a damaged part; tries it out, where that is possible."""
        if self._checks_writes is None:
            try:
                self._checks_writes = self.abilities().checksum is not None
            except LevelError:
                return False
        return self._checks_writes

    @checks_writes.setter
    def checks_writes(self, checks: bool) -> None:
        self._checks_writes = checks

    def _try_out(self) -> Abilities:
        name = probe_name()
        return Abilities(next((one for one in ("crc32", "md5") if self._notices_damage(name, one)), None))

    def _notices_damage(self, name: str, algorithm: str) -> bool:
        """Whether a part is refused whose checksum is that of other bytes."""
        what, key = "trying the bucket out", self.key(name)
        start = {"ChecksumAlgorithm": "CRC32"} if algorithm == "crc32" else {}
        refusals = (Kind.DAMAGED, Kind.OTHER)
        try:
            upload = self.client.call(what, "create_multipart_upload", keep=refusals, Key=key, **start)["UploadId"]
        except Failure:
            return False
        try:
            wrong = checksum_arguments(algorithm, memoryview(b"other bytes"))
            part = {"Key": key, "UploadId": upload, "PartNumber": 1, **wrong}
            self.client.send(what, "upload_part", memoryview(b"probe"), keep=refusals, **part)
        except Failure as failure:
            right = {**part, **checksum_arguments(algorithm, memoryview(b"probe"))}
            try:  # a server that refuses the header itself notices nothing
                self.client.send(what, "upload_part", memoryview(b"probe"), keep=refusals, **right)
            except Failure:
                return False
            return failure.kind in refusals
        finally:
            self.abort(key, upload)
        return False

    # ---------------------------------------------------------------- writing and reading

    def begin(self, path: str, size_bytes: int) -> PartWriter:
        """Start an upload."""
        return PartWriter(self, path, size_bytes)

    def put(self, path: str, data: bytes) -> None:
        """Put a small object by one request."""
        self._reach("put", path)
        found = _abilities.get((self.client.endpoint, self.client.bucket))
        checksum = checksum_arguments(found.checksum if found else None, memoryview(data))
        self.client.send(f"putting {path}", "put_object", memoryview(data), Key=self.key(path), **checksum)
        self._reach("put_done", path)

    def get(self, path: str) -> bytes:
        """Get a small object."""
        data = self.client.receive_all(f"reading {path}", self.key(path), MAX_SMALL_BYTES)
        if data is None:
            raise ShardCorrupt(f"{self.url}/{path}: a manifest has at most {MAX_SMALL_BYTES} bytes")
        return data

    def reader(self, path: str) -> S3Reader:
        """Nothing is opened."""
        return S3Reader(self, path)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Get one range."""
        if len(out):
            S3Reader(self, path).read_into(offset, out)
        else:
            self.size(path)

    def _head(self, path: str) -> dict[str, Any]:
        key = self.key(path)
        try:
            return self.client.call(f"looking at {path}", "head_object", keep=(Kind.REFUSED, Kind.OTHER), Key=key)
        except Failure as failure:
            # A refusal of HEAD has no body that would say why; the same as GET has.
            self.client.receive(f"looking at {path}", key, 0, memoryview(bytearray(1)))
            raise self.client.error(f"looking at {path}", failure) from failure

    def exists(self, path: str) -> bool:
        """See ``ObjectStorage``."""
        try:
            self._head(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: str) -> int:
        """Bytes of an object."""
        return int(self._head(path)["ContentLength"])

    def stamp(self, path: str) -> object:
        """Tag, time and size."""
        facts = self._head(path)
        return facts.get("ETag"), str(facts.get("LastModified")), facts["ContentLength"]

    def _now(self, answer: Mapping[str, Any]) -> datetime:
        """The server's clock."""
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])

    def age_s(self, path: str) -> float | None:
        """See ``ObjectStorage``; by the server's clock alone."""
        facts = self._head(path)
        try:
            return float((self._now(facts) - facts["LastModified"]).total_seconds())
        except (KeyError, ValueError, TypeError):
            return None

    # ---------------------------------------------------------------- deleting

    def delete(self, path: str) -> None:
        """Delete an object; S3 does not say whether there was one."""
        self._reach("delete", path)
        try:
            self.client.call(f"deleting {path}", "delete_object", Key=self.key(path))
        except FileNotFoundError:
            return
        self._reach("deleted", path)

    def delete_directory(self, path: str) -> None:
        """A directory is there as long as objects are; some servers go on to list it, as an object of no bytes."""
        marker = self.key(f"{path}/" if path else "")
        if not marker:
            return
        try:
            answer = self.client.call(f"listing {path}", "list_objects_v2", Prefix=marker, Delimiter="/", MaxKeys=2)
            if [one["Key"] for one in answer.get("Contents", ())] == [marker] and not answer.get("CommonPrefixes"):
                self.client.call(f"deleting {path}", "delete_object", Key=marker)
        except (LevelError, FileNotFoundError) as error:
            logger.debug("a directory stays: %s", error)

    def abort(self, key: str, upload: str) -> None:
        """Give up an upload; harmless if it is gone."""
        what = f"aborting an upload of {key}"
        try:
            self.client.call(what, "abort_multipart_upload", keep=(Kind.NO_UPLOAD,), Key=key, UploadId=upload)
        except (Failure, FileNotFoundError):
            return

    def abort_stale(self, path: str = "") -> list[str]:
        """See ``Storage.abort_stale``. Foreign uploads below the prefix stay, and any that began within a day."""
        gone: list[str] = []
        for key, upload, age_s in self._uploads(self.key(f"{path}/" if path else "")):
            inner = key[len(self.client.root) + 1 if self.client.root else 0 :]
            if age_s >= SETTLED * self.abandoned_after_s and (is_shard_path(inner) or is_probe(inner)):
                self.abort(key, upload)
                gone.append(inner)
        return gone

    def _uploads(self, prefix: str) -> list[tuple[str, str, float]]:
        """Key, id and age in seconds, by the server's clock; 0 where the server does not say."""
        found: list[tuple[str, str, float]] = []
        markers: dict[str, Any] = {}
        while True:
            keep = (Kind.REFUSED, Kind.OTHER)
            try:
                answer = self.client.call(
                    "listing uploads", "list_multipart_uploads", keep=keep, Prefix=prefix, **markers
                )
            except Failure as failure:
                # Half uploads cost money, but harm no snapshot: a right that is lacking must not stop the sweep.
                logger.warning(
                    "%s: unfinished uploads cannot be listed (%s); let a lifecycle rule abort them",
                    self.client.redaction.clean(self.url),
                    failure.code,
                )
                return found
            found += [(one["Key"], one["UploadId"], self._age_s(answer, one)) for one in answer.get("Uploads", ())]
            if not answer.get("IsTruncated"):
                return found
            markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer.get("NextUploadIdMarker", "")}

    def _age_s(self, answer: Mapping[str, Any], upload: Mapping[str, Any]) -> float:
        try:
            return float((self._now(answer) - upload["Initiated"]).total_seconds())
        except (KeyError, ValueError, TypeError):
            return 0.0

    # The last one: it hides the type from the annotations behind it.
    def list(self, path: str = "", prefix: str = "") -> list[str]:
        """Names below a prefix."""
        folder = self.key(path + "/" if path else "")
        names: set[str] = set()
        token: dict[str, Any] = {}
        while True:
            answer = self.client.call(
                f"listing {path or '.'}", "list_objects_v2", Prefix=folder + prefix, Delimiter="/", **token
            )
            found = [one["Key"] for one in answer.get("Contents", ())]
            found += [one["Prefix"] for one in answer.get("CommonPrefixes", ())]
            names.update(name[len(folder) :].rstrip("/") for name in found)
            if not answer.get("IsTruncated"):
                return sorted(names - {""})
            token = {"ContinuationToken": answer["NextContinuationToken"]}
