"""How long does a rollback in place take, beside a plain copy of the same bytes?

    python benchmarks/rollback.py                 # 1 GB of state
    python benchmarks/rollback.py --megabytes 200 --repeats 3

A model with AdamW, captured in memory; then ``engine.rollback()`` some times. Two cases: ``newest`` goes back to the
last capture, as after a bad loss; ``older`` goes back over one capture, which begins a new run and captures its first
state before the call returns. The ratio is to a copy of as many bytes between two buffers that are warm, in the same
process. Prints a JSON line per case; writes them to ``--out`` as well.
"""

import argparse
import json
import platform
import statistics
import time
import uuid
from pathlib import Path

import torch

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine

TARGET_S = 0.5
"""For 1 GB in memory on a CPU."""


def copy_s(size: int, repeats: int) -> float:
    """Median seconds of one copy between two warm buffers."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    target.copy_(source)
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="of state: weights and two moments")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/rollback.jsonl"))
    options = parser.parse_args()
    width = 1024
    layers = max(1, round(options.megabytes * 1e6 / 12 / width**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=0.0, slots=3))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})

    def train(step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        engine.boundary(step)
        assert engine.wait(step, until="captured", timeout_s=60)

    assert engine.wait_ready(60)
    train(1)
    size = 12 * layers * width**2
    copying_s = copy_s(size, options.repeats)
    step, lines = 1, []
    for case, steps in (("newest", 1), ("older", 2)):
        found = []
        for _ in range(options.repeats):
            train(step + 1)
            train(step + 2)
            done = engine.rollback(steps=steps)
            assert done.level == "memory"
            step = done.step
            found.append(done.seconds)
        middle = statistics.median(found)
        line = {
            "measure": "rollback",
            "case": case,
            "bytes": size,
            "seconds": middle,
            "range": [min(found), max(found)],
            "memcpy_s": copying_s,
            "ratio": middle / copying_s,
            "is_met": middle * 1e9 / size < TARGET_S if case == "newest" else None,
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        lines.append(json.dumps(line))
        print(lines[-1])
    engine.close(drain=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
