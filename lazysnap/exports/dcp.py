"""A snapshot as a directory of ``torch.distributed.checkpoint``, written by its own writer."""

import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from lazysnap.errors import LazySnapError, StateError
from lazysnap.exports.checkpoint import stock_state
from lazysnap.exports.job import Job
from lazysnap.exports.states import Outline
from lazysnap.levels.source import Progress
from lazysnap.shard.pieces import Extent
from lazysnap.snapshots.assembly import JoinedTensor, Tile, WholeSnapshot
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import into

_BATCH_BYTES = 128 << 20
"""Tensors that are in memory at a time; larger boxes are cut."""


def write_distributed(whole: WholeSnapshot, job: Job, path: str) -> list[str]:
    """Write a new directory; return notes for the user. No process group is needed.

    Optimizers are in the form of ``get_state_dict`` where the snapshot has the names of their parameters.
    Blocks. Raises: OSError; StateError, if two values get one name (DCP joins keys with points); FormatError;
    LevelError.
    """
    outline = Outline(whole)
    state, notes = stock_state(whole, outline)
    for place, names in (whole.meta.parameters or {}).items():
        state = _named(state, place, names)
    writer = FileSystemWriter(path, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings(), job.bar("exporting", outline.size_bytes) as progress:
            warnings.simplefilter("ignore")  # it warns that there is no process group
            save(state, storage_writer=writer, planner=_Planner(outline, progress), no_dist=True)
    except ValueError as error:
        raise StateError(f"torch.distributed.checkpoint cannot hold this state: {error}") from error
    except CheckpointException as error:
        cause = next((failure for failure, _ in error.failures.values()), error)
        if isinstance(cause, (LazySnapError, OSError, KeyboardInterrupt)):
            raise cause from None
        raise OSError(f"{path}: torch.distributed.checkpoint failed: {error}") from error
    return notes


def _named(value: Any, place: str, names: Sequence[str]) -> Any:
    """Return a state in which the optimizer at ``place`` has names of parameters instead of numbers."""
    if not place:
        return _by_name(value, names)

    def named(key: object, item: Any) -> Any:
        is_there = place == str(key) or place.startswith(f"{key}.")
        return _named(item, place[len(str(key)) + 1 :], names) if is_there else item

    if isinstance(value, dict):
        return {key: named(key, item) for key, item in value.items()}
    return [named(number, item) for number, item in enumerate(value)] if isinstance(value, list) else value


def _by_name(value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, dict) or len(set(names)) < len(names):
        return value
    state, groups = value.get("state"), value.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return value
    numbers = [*state, *(number for group in groups for number in group["params"])]
    if not all(type(number) is int and 0 <= number < len(names) for number in numbers):
        return value
    return {
        **value,
        "state": {names[number]: item for number, item in state.items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor that DCP writes at a time."""

    item: WriteItem
    tensor: JoinedTensor | None
    tile: Tile | None
    value: torch.Tensor
    """An outline, or the part itself if the snapshot has no such tensor."""

    @property
    def shape(self) -> torch.Size:
        assert self.item.tensor_data is not None
        return self.item.tensor_data.chunk.sizes

    @property
    def place(self) -> tuple[str, int, Extent]:
        """The place of its first byte. Sorted by it, chunks are in the order of the files."""
        if self.tile is None:
            return "", 0, ()
        return self.tile.stored.shard.where, self.tile.stored.offset, self.tile.offsets


def _key(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())


class _Planner(DefaultSavePlanner):
    """Plans the parts that the shards hold, in their order, and reads some of them at a time."""

    def __init__(self, outline: Outline, progress: Progress) -> None:
        super().__init__()
        self._outline = outline
        self._progress = progress
        self._chunks: list[_Chunk] = []
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self._read: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """See ``DefaultSavePlanner``; tensors in values that DCP pickles are read."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {
            name: value if isinstance(value, torch.Tensor) else self._outline.read(value)
            for name, value in self.state_dict.items()
        }

    def create_local_plan(self) -> SavePlan:
        """See ``DefaultSavePlanner``."""
        items = []
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                self._chunks += self._cut(name, value)
            else:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self._chunks.sort(key=lambda chunk: chunk.place)
        self._numbers = {_key(chunk.item): number for number, chunk in enumerate(self._chunks)}
        self.plan = SavePlan([*items, *(chunk.item for chunk in self._chunks)], planner_data=self.mappings)
        return self.plan

    def _cut(self, name: str, value: torch.Tensor) -> Iterator[_Chunk]:
        source = self._outline.source(value)
        tiles: list[Tile | None] = [] if source is None else list(source.cut(_BATCH_BYTES))
        for tile in tiles or [None]:
            offsets, sizes = ((0,) * value.dim(), value.shape) if tile is None else (tile.offsets, tile.shape)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), value.shape)
            item = WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)
            yield _Chunk(item, source, tile, value)

    def resolve_data(self, write_item: WriteItem) -> "torch.Tensor | io.BytesIO":
        """See ``DefaultSavePlanner``."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        if _key(write_item) not in self._read:
            self._read_from(self._numbers[_key(write_item)])
        return self._read[_key(write_item)]

    def _read_from(self, number: int) -> None:
        """Read this chunk and the next ones, as many as may be in memory at a time."""
        for old in self._read.values():
            old.untyped_storage().resize_(0)  # DCP keeps every tensor until its file is complete
        self._read, size = {}, 0
        reads = Reads()
        for chunk in self._chunks[number:]:
            size += chunk.shape.numel() * chunk.value.itemsize
            if self._read and size > _BATCH_BYTES:
                break
            is_outline = chunk.tensor is not None
            made = torch.empty(chunk.shape, dtype=chunk.value.dtype) if is_outline else chunk.value.clone()
            self._read[_key(chunk.item)] = made
            if chunk.tensor is not None and chunk.tile is not None:
                reads.add_tile(chunk.tile.alone(), chunk.tensor.item_bytes, into(made))
        reads.run(self._progress)
