"""Small snapshots to write, and what can be asked of a place afterwards."""

import pathlib
import subprocess

import pytest
from support.catalogue import inventory_of
from support.image import Image as Image
from support.names import START
from support.snapshots import read_image

from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import map_anonymous
from lazysnap.shard.manifest import CaptureMeta

RUN, OTHER = "0" * 16, "f" * 16


def meta(step: int, run: str = RUN) -> CaptureMeta:
    return CaptureMeta(run, START, step, 0, 1, 3, state={"step": step})


def whole(storage, run: str = RUN) -> list[int]:
    """Steps of ``run`` that can be restored: every block read and verified."""
    steps = []
    for entry in inventory_of(storage).entries:
        manifest = FilePlace.of(storage, entry).read_manifest()
        out = map_anonymous(manifest.size_bytes)
        read_image(storage, entry, out)
        assert out[-1] == entry.step % 256
        if entry.run_id == run:
            steps.append(entry.step)
    return sorted(steps)


def files(root: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def mount(path: pathlib.Path, size: str) -> None:
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root")
