"""The same over a real S3 server."""

import pytest
import seaweed
import torch
import torch.distributed.checkpoint as dcp
from saving import Snapshot, bits, directory_of, image_of, rows
from torch.distributed.checkpoint.api import CheckpointException

from lazysnap.dcp import SnapshotReader
from lazysnap.levels import open_store
from lazysnap.levels.source import MemorySource

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def test_a_snapshot_in_a_bucket_is_loaded_with_rights_to_read_only(s3_server, s3_url):
    store = open_store(s3_url, options=s3_server.options())
    snapshot, cut = Snapshot(s3_url, 2), rows(2)
    weight = torch.randn(1001, 3000)
    for rank in range(2):
        offsets, box = cut("w", weight, rank)
        layout, room = image_of({"w": box})
        facts = {"w": {"scope": "shard", "global_shape": [1001, 3000], "offsets": list(offsets)}}
        meta = snapshot.meta(rank, tensors=facts, state={"w": {"$": "tensor", "v": "w"}, "epoch": 7})
        store.write(meta, MemorySource(room, layout.size_bytes))
    target = {"w": torch.zeros(1001, 3000), "epoch": 0}

    dcp.load(target, storage_reader=SnapshotReader(s3_url, storage_options=s3_server.options(seaweed.READER)))

    assert bits(target["w"]) == bits(weight)
    assert target["epoch"] == 7
    store.storage.delete(f"{directory_of(10)}/node-00001-of-00002.safetensors")
    with pytest.raises(CheckpointException, match="the shard of rank 1 is lost"):
        dcp.load(target, storage_reader=SnapshotReader(s3_url, storage_options=s3_server.options()))
