"""An S3 bucket as a place for snapshots, through botocore."""

import logging
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from lazysnap.errors import LevelError, ShardCorrupt
from lazysnap.levels.leftovers import is_node_file_path
from lazysnap.levels.s3_client import PATIENCE_S, STALL_S, S3Client
from lazysnap.levels.s3_errors import Failure, Kind
from lazysnap.levels.s3_upload import S3Writer, checksum_of
from lazysnap.levels.storage import MAX_SMALL_BYTES, SETTLED, Storage, is_probe, probe_name

logger = logging.getLogger(__name__)

_compares_checksums: dict[tuple[str, str], bool] = {}
"""By endpoint and bucket: whether the server refuses a part whose CRC32C is wrong. Tried once per process."""


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
