"""What is shown while the last snapshot is stored: bytes."""

import pytest
import torch
from support.waiting import TIMEOUT_S

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine


@pytest.mark.slow
def test_progress_of_the_end_is_told_in_bytes_of_all_levels(tmp_path):
    model = torch.nn.Linear(3000, 3000)
    levels = [PersistentLevel(str(tmp_path / name), every_n_steps=1000, max_bytes_per_s=30_000_000) for name in "ab"]
    engine = SnapshotEngine(SnapshotConfig(levels=tuple(levels)), {"model": model})
    assert engine._wait_ready(TIMEOUT_S)
    assert engine.boundary(1)
    assert engine.wait(1, timeout_s=TIMEOUT_S)  # the first is stored in any case
    assert engine.boundary(2)
    shard_bytes = engine.statistics().shard_bytes
    told = []

    assert engine.close(progress=lambda done, total: told.append((done, total)))

    assert {total for _, total in told} == {2 * shard_bytes}
    done = [done for done, _ in told]
    assert done == sorted(done)
    assert done[-1] == 2 * shard_bytes
    assert any(0 < value < 2 * shard_bytes for value in done), "nothing was told on the way"
