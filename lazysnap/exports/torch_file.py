"""A file of ``torch.save`` of any size: torch reserves space for the tensors, and they are copied one by one."""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap.errors import StateError
from lazysnap.exports.job import behind
from lazysnap.exports.states import Outline, bytes_of, identity_of
from lazysnap.levels.files import pwrite_all
from lazysnap.snapshots.reads import Reads, written

_READ_BYTES = 16 << 20


class TorchFile:
    """A new file of ``torch.save``. It is filled when the reads run that it was given; ``seal`` it then."""

    def __init__(self, value: Any, path: str, outline: Outline, files: ExitStack, reads: Reads) -> None:
        """Tensors that ``outline`` knows are added to ``reads``, the others are written now. ``files`` closes the file.

        Blocks. Raises: StateError, for a value that cannot be pickled; OSError.
        """
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                storages = _Storages()
                storages.dump(value)
                torch.save(value, path)
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            raise StateError(f"{os.path.basename(path)}: a value cannot be pickled: {error}") from error
        except RuntimeError as error:  # so torch's writer reports a full disk
            raise OSError(f"{path}: torch.save failed: {error}") from error
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        files.callback(os.close, self._handle)
        records = {record.name: record for record in _records(path)}
        self._records = [records[f"data/{number}"] for number in range(len(storages.found))]
        for storage, record in zip(storages.found.values(), self._records, strict=True):
            source = outline.source_of(storage)
            if source is None:
                pwrite_all(self._handle, record.start, bytes_of(storage))
            else:
                reads.add(source, written(source, behind(self._handle, record.start)))

    def seal(self) -> None:
        """Write the checksums of the tensors, which torch ignores and other readers of zip files compare. Blocks."""
        for record in self._records:
            crc = 0
            for at in range(0, record.size_bytes, _READ_BYTES):
                count = min(_READ_BYTES, record.size_bytes - at)
                crc = zlib.crc32(os.pread(self._handle, count, record.start + at), crc)
            field = memoryview(struct.pack("<I", crc))
            pwrite_all(self._handle, record.entry + 16, field)
            descriptor = record.start + record.size_bytes
            if os.pread(self._handle, 4, descriptor) == b"PK\x07\x08":
                pwrite_all(self._handle, descriptor + 4, field)


class _Storages(pickle.Pickler):
    """Finds the memory of all tensors in a value, in the order in which ``torch.save`` numbers it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, value: Any) -> str | None:
        """Record the memory of a tensor, and have a placeholder pickled instead."""
        storage = value._untyped_storage if isinstance(value, torch.storage.TypedStorage) else value
        if not isinstance(storage, torch.UntypedStorage):
            return None
        self.found.setdefault(identity_of(storage), storage)
        return "storage"


@dataclass(frozen=True)
class _Record:
    """A member of a zip file."""

    name: str
    start: int
    """Offset of its bytes."""
    size_bytes: int
    entry: int
    """Offset of its entry in the directory at the end."""


def _records(path: str) -> Iterator[_Record]:
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        entry = archive.start_dir
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
            start = info.header_offset + 30 + name_bytes + extra_bytes
            yield _Record(info.filename.partition("/")[2], start, info.file_size, entry)
            file.seek(entry + 28)
            entry += 46 + sum(struct.unpack("<HHH", file.read(6)))
