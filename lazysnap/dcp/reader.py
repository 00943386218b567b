"""A ``StorageReader`` for snapshots. DCP plans which tensors each rank needs; this module finds and reads the bytes.

DCP sees every tensor as one chunk. So its plans stay small for any number of ranks that saved it, and ranks that listed
the level at different times can still agree on one snapshot before they read.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lazysnap.dcp.keys import Leaf, StateKeys
from lazysnap.dcp.planner import load_value
from lazysnap.errors import ConfigError, StateMismatch
from lazysnap.levels import open_store
from lazysnap.resolver import RestartPlan, SnapshotKey
from lazysnap.runs import LATEST
from lazysnap.shard.names import is_keep_name
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import OpenSnapshot, open_best, read
from lazysnap.snapshots.tensors import Boxes, SnapshotTensors
from lazysnap.state.codec import decode, tensor_names

logger = logging.getLogger(__name__)


class KeyMap(dict[str, TensorStorageMetadata | BytesStorageMetadata]):
    """DCP's metadata of a snapshot by key: each value is listed once, and found by its other keys too."""

    def __init__(self, snapshot: SnapshotTensors, keys: StateKeys) -> None:
        super().__init__({key: _metadata(snapshot, leaf) for key, leaf in keys.listed.items()})
        self._snapshot = snapshot
        self.by_key = keys

    def paths(self) -> dict[str, Any]:
        """By listed key: the path of its value in a nested state dict."""
        return {key: leaf.path for key, leaf in self.by_key.listed.items()}

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.by_key

    def __missing__(self, key: str) -> "TensorStorageMetadata | BytesStorageMetadata":
        leaf = self.by_key.find(key)
        if leaf is None:
            raise KeyError(key)
        return _metadata(self._snapshot, leaf)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any mapping."""
        try:
            return self[key]
        except KeyError:
            return default

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _metadata(snapshot: SnapshotTensors, leaf: Leaf) -> "TensorStorageMetadata | BytesStorageMetadata":
    if leaf.tensor is None:
        return BytesStorageMetadata()
    dtype, shape = snapshot.facts(leaf.tensor)
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [whole] if 0 not in shape else [])


class SnapshotReader(StorageReader):
    """Reads a snapshot for ``torch.distributed.checkpoint.load``, in any number of processes.

    ``url``: a level, as in ``PersistentLevel``. ``step``: ``"latest"``, a step, or a name given by ``keep``. State of
    one rank alone (buffers, generators) is this rank's if as many ranks load as saved, else rank 0's.
    ``verify=False`` skips the checksums of blocks.

    All methods block. ``dcp.load`` wraps every error in a ``CheckpointException``, which is no ``Exception``. A damaged
    snapshot is an error if ``step`` names it; ``"latest"`` skips it with a warning.
    """

    def __init__(
        self,
        url: str,
        *,
        step: "int | str" = LATEST,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
    ) -> None:
        """Raises: ConfigError; LevelUnavailable, if fsspec does not know the protocol or lacks its package."""
        is_number = type(step) is int and step >= 0
        if not is_number and not is_keep_name(step):
            raise ConfigError(f'step must be "latest", a step >= 0 or the name of a kept snapshot, got {step!r:.100}')
        self._which = step
        self._options = storage_options
        self._verify = verify
        self._store = open_store(url, options=storage_options)
        self._open: SnapshotTensors | None = None
        self._keys: KeyMap | None = None
        self.bytes_read = 0
        """Bytes of shards that the last load read on this rank."""

    @property
    def checkpoint_id(self) -> str:
        """The level, as DCP calls it in its log."""
        return self._store.url

    @property
    def step(self) -> int | None:
        """The step of the snapshot that was loaded last, ``None`` before the first load."""
        return self._open.snapshot.plan.step if self._open is not None else None

    # ---------------------------------------------------------------- as DCP calls it

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin a new load: ``"latest"`` is searched again. ``checkpoint_id``: another level."""
        if self._open is not None:
            self._open.snapshot.close()
        self._open = self._keys = None
        if checkpoint_id is not None:
            self._store = open_store(os.fspath(checkpoint_id), options=self._options)

    # Not called ``kwargs``: then DCP would repeat the call on one rank alone after an error, and the others would hang.
    def read_metadata(self, *_unused: Any, **_options: Any) -> Metadata:
        """Choose and open a snapshot. Blocks: one listing, the manifests of one snapshot, the headers of its shards.

        Raises: SnapshotNotFound, listing what was skipped; ShardCorrupt; LevelError.
        """
        self._find(None)
        assert self._keys is not None
        return Metadata(self._keys, planner_data=self._keys.paths())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_unused: Any, **_options: Any) -> None:
        """Nothing more to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the snapshot that this rank found."""
        assert self._open is not None
        return _with_key(plan, self._open.snapshot.plan.key)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks read the oldest snapshot that one of them found: others may not see a newer one yet."""
        oldest = min(map(_key_of, plans))
        return [_with_key(plan, oldest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Fill what ``plan`` asks for. Blocks.

        Raises: ShardCorrupt, naming shard and block; LevelError; StateMismatch. The targets are garbage then.
        """
        agreed = _key_of(plan)
        if self._open is None or self._open.snapshot.plan.key != agreed:
            self._find(agreed)
        assert self._open is not None
        assert self._keys is not None
        self._fill(self._open, self._keys.by_key, plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Any path or URL may be a level."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    # ---------------------------------------------------------------- how

    def _find(self, agreed: SnapshotKey | None) -> None:
        """Open the best snapshot that can be opened, or the one that the ranks agreed on."""
        self.reset()

        def plans(catalogue: Catalogue) -> Iterator[RestartPlan]:
            found = catalogue.meant(self._which) if agreed is None else catalogue.plans(step=agreed.step)
            return (plan for plan in found if agreed in (None, plan.key))

        def use(snapshot: OpenSnapshot) -> tuple[SnapshotTensors, KeyMap]:
            opened = SnapshotTensors(snapshot, _own_rank(snapshot.plan.world_size))
            with snapshot.naming():
                return opened, KeyMap(opened, StateKeys(opened.meta.state, opened.meta.parameters))

        what = f"step {agreed.step}" if agreed is not None else repr(self._which)
        is_strict = agreed is not None or self._which != LATEST
        self._open, self._keys = open_best(self._store, plans, use, what, is_strict=is_strict)

    def _fill(self, snapshot: SnapshotTensors, keys: StateKeys, plan: LoadPlan, planner: LoadPlanner) -> None:
        boxes = Boxes()
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        values: list[tuple[ReadItem, Any]] = []
        casts = set()
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                current = getattr(planner, "state_dict", {}).get(item.dest_index.fqn)
                values.append((item, keys.encoded(key, current)))
                continue
            leaf = keys.find(key)
            if leaf is None or leaf.tensor is None:
                raise StateMismatch(f"{self._store.url}: the snapshot has no tensor {key!r}")
            whole = snapshot.whole(leaf.tensor)
            target = planner.resolve_tensor(item).detach()
            at = item.storage_index.offset or (0,) * len(item.storage_offsets)
            offsets = tuple(a + b for a, b in zip(at, item.storage_offsets, strict=True))
            is_inside = all(a + n <= m for a, n, m in zip(offsets, item.lengths, whole.shape, strict=True))
            if tuple(target.shape) != tuple(item.lengths) or not is_inside:
                raise StateMismatch(
                    f"{key}: {list(target.shape)} here for {list(item.lengths)} at {list(offsets)} of {whole.shape}"
                )
            if target.dtype != whole.dtype:
                casts.add(key)
            boxes.add(whole, whole.pieces, offsets, target)
            tensors.append((item, target))
        inner = snapshot.new([name for _, encoded in values for name in tensor_names(encoded)], boxes)
        with snapshot.snapshot.leased():
            self.bytes_read = read(boxes.take(), verify=self._verify)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        for item, encoded in values:
            with snapshot.snapshot.naming():
                value = decode(encoded, tensor=inner.__getitem__)
            load_value(planner, item, value)
        if casts:
            # DCP casts too, without a message.
            logger.warning("%d tensors have another dtype here and were cast, among them %s", len(casts), min(casts))


def _with_key(plan: LoadPlan, key: SnapshotKey) -> LoadPlan:
    """``plan`` with the snapshot that it is for: DCP sends it to the coordinator and back."""
    data: Any = key
    return replace(plan, storage_data=data)


def _key_of(plan: LoadPlan) -> SnapshotKey:
    """The snapshot that ``plan`` is for. Raises: ConfigError, if a planner dropped it."""
    if not isinstance(plan.storage_data, SnapshotKey):
        raise ConfigError(
            f"the planner dropped LoadPlan.storage_data (it holds {plan.storage_data!r:.50}); keep it: without it "
            "ranks could read different snapshots"
        )
    return plan.storage_data


def _own_rank(world_size: int) -> int:
    """The rank whose small state and own tensors are read."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size:
        return dist.get_rank()
    return 0
