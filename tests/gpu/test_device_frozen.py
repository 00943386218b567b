"""Frozen tensors on a device: the same bytes as from a CPU, and a change is noticed."""

import unittest
import uuid

import torch
from support import accelerator

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine
from lazysnap.capture.frozen import FrozenSet, digest_of, frozen_parameters
from lazysnap.shard.checksum import Checksums
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

TIMEOUT_S = 30
WIDTH = 2048


def make(device):
    torch.manual_seed(0)
    base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = torch.nn.Sequential(base, torch.nn.Linear(WIDTH, 8)).to(device)
    return model, torch.optim.AdamW(model[1].parameters(), lr=1e-3)


def chosen(device):
    model, optimizer = make(device)
    with torch.no_grad():
        model[0].weight.mul_(2)  # on a device: queued, and not done when the set is read
    source = ObjectState({"model": model, "optimizer": optimizer})
    walked = walk(source.collect())
    named = list(zip(walked.names, walked.tensors, strict=True))
    return model, FrozenSet.of(frozen_parameters(named, source), named)


def digest(pieces):
    return digest_of(pieces)


@unittest.skipUnless(accelerator.IS_THERE, accelerator.WHY_NOT)
class FrozenTensorsOnDevice(unittest.TestCase):
    def test_the_bytes_of_a_device_are_those_of_a_cpu(self):
        _, on_cpu = chosen("cpu")
        _, on_device = chosen(accelerator.TYPE)
        room = memoryview(bytearray(on_device.size_bytes))

        copied = digest(on_device.copied_into(room))

        assert copied == digest(on_device.pieces()) == digest(on_cpu.pieces())
        assert Checksums.of(room).whole == copied

    def test_a_change_in_place_is_noticed(self):
        model, frozen = chosen(accelerator.TYPE)
        assert frozen.changed() == []
        with torch.no_grad():
            model[0].weight.mul_(0.5)

        assert frozen.changed() == ["model.0.weight"]

    def test_a_fine_tuning_on_a_device_is_captured_without_its_base_and_restored(self):
        config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=5))
        model, optimizer = make(accelerator.TYPE)
        engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
        assert engine._wait_ready(TIMEOUT_S)
        for step in range(1, 200):
            model(torch.randn(4, WIDTH, device=accelerator.TYPE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if engine.boundary(step) and step > 5:
                break
            engine._wait_ready(TIMEOUT_S)
        engine.gate()
        assert engine.wait(step, until="captured", timeout_s=TIMEOUT_S)
        held = {name: value.cpu() for name, value in model.state_dict().items()}

        snapshot = engine._fetch("latest")

        assert snapshot.step == step
        assert engine.statistics().shard_bytes < WIDTH * WIDTH < engine.statistics().frozen_bytes
        assert all(snapshot.state["model"][name].equal(value) for name, value in held.items())
        assert engine.close(drain=False)
