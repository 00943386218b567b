"""Without Lightning, everything but the callback works, and the callback says what to install."""

import subprocess
import sys

PROGRAM = """
import importlib.abc, os, sys
import torch

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"):
            raise ModuleNotFoundError(name, name=name)

child = os.fork()
if child:
    sys.meta_path.insert(0, Refuse())
else:
    sys.modules.update(lightning=None, pytorch_lightning=None)
import lazysnap
from lazysnap import SnapshotConfig, SnapshotEngine, load_weights

for attempt in ("from lazysnap import LazySnapshotCallback", "lazysnap.LazySnapshotCallback()"):
    try:
        exec(attempt)
    except ImportError as error:
        os.write(1, f"{type(error).__name__} {error}\\n".encode())
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""
"""In two ways: a finder refuses the packages, or their names are blocked."""


def test_the_callback_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stdout
    assert all('run `pip install "lazysnap[lightning]"`' in line for line in lines), done.stdout
