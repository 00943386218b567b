"""Types of messages and manifests that several threads use for the first time, at once."""

import os
import subprocess
import sys

import pytest

CHILD = """
import sys, threading
sys.setswitchinterval(1e-7)
{make}
barrier = threading.Barrier(8)

def work():
    barrier.wait()
    for _ in range(3):
        use()

threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
METADATA = """
from lazysnap.shard.manifest import CaptureMeta
data = CaptureMeta("ab" * 8, "cd" * 8, 1, 0, 1, 0).to_bytes()
use = lambda: CaptureMeta.from_bytes(data)
"""
MANIFEST = """
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta, Manifest, Shard
from lazysnap.shard.names import NodeName
meta = CaptureMeta("ab" * 8, "cd" * 8, 1, 0, 1, 0)
checksums = Checksums.of(memoryview(bytes(64)))
data = Manifest(NodeName(0, 1), (Shard(meta, 0, 64, 8),), checksums, 1).encode()
use = lambda: Manifest.decode(data, "here")
"""
MESSAGE = """
from lazysnap.core.messages import KeeperState
from lazysnap.keeper.wire import _decode, _encode
data = _encode(KeeperState())
use = lambda: _decode(data)
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", [METADATA, MANIFEST, MESSAGE], ids=["metadata", "manifest", "message"])
def test_the_first_use_by_several_threads_ends_no_process(make):
    """Without types that are built when they are imported, two of three of these processes died of a wrong address."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(4):
        child = subprocess.run(
            [sys.executable, "-c", CHILD.format(make=make)], env=environment, capture_output=True, text=True
        )
        assert child.returncode == 0, (child.returncode, child.stderr[-2000:])
