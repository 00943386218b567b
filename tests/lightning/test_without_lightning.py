"""Without Lightning, everything but the callback works, and the callback says what to install."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"):
            {refusal}

sys.meta_path.insert(0, Refuse())
{hide}
import lazysnap
from lazysnap import SnapshotConfig, SnapshotEngine, load_weights

for attempt in ("from lazysnap import LazySnapshotCallback", "lazysnap.LazySnapshotCallback()"):
    try:
        exec(attempt)
    except ImportError as error:
        print(type(error).__name__, error)
"""
WAYS = {
    "a finder refuses": ("raise ModuleNotFoundError(name, name=name)", ""),
    "the name is blocked": ("return None", "sys.modules.update(lightning=None, pytorch_lightning=None)"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_callback_says_what_to_install(way):
    refusal, hide = WAYS[way]
    code = PROGRAM.format(refusal=refusal, hide=hide)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    assert all('run `pip install "lazysnap[lightning]"`' in line for line in lines), done.stdout
