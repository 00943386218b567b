"""Restores onto a device: what was read goes there block by block, beside reading and comparing."""

import contextlib
import unittest
import uuid

import torch
from support import accelerator

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine

TIMEOUT_S = 60
WIDTH = 1024


def make():
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).to(accelerator.TYPE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer):
    model(torch.randn(16, WIDTH, device=accelerator.TYPE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model, optimizer):
    held = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu().clone() for tensor in (*model.parameters(), *held)]


@unittest.skipUnless(accelerator.IS_THERE, accelerator.WHY_NOT)
class RestoreOntoDevice(unittest.TestCase):
    def setUp(self):
        """Something is captured by an engine that leaves as a crash would."""
        self.config = SnapshotConfig(
            job_id=f"gpu-{uuid.uuid4().hex}", memory=MemoryLevel(linger_s=TIMEOUT_S), verify_restart=False
        )
        model, optimizer = make()
        engine = SnapshotEngine(self.config, {"model": model, "optimizer": optimizer})
        train(model, optimizer)
        assert engine._wait_ready(TIMEOUT_S)
        assert engine.boundary(1)
        assert engine.wait(1, until="captured", timeout_s=TIMEOUT_S)
        self.saved = values(model, optimizer)
        engine.abandon()

    def test_a_fetched_snapshot_lies_where_the_live_tensors_do(self):
        model, optimizer = make()
        engine = SnapshotEngine(self.config, {"model": model, "optimizer": optimizer})

        snapshot = engine._fetch()

        state = snapshot.state["optimizer"]["state"]
        assert {tensor.device.type for tensor in snapshot.state["model"].values()} == {accelerator.TYPE}
        assert {one["exp_avg"].device.type for one in state.values()} == {accelerator.TYPE}
        assert {one["step"].device.type for one in state.values()} == {"cpu"}
        engine.close()

    def test_a_restore_is_exact(self):
        self.check_restore(has_room=True)

    def test_a_restore_is_exact_where_the_device_has_no_room_for_a_second_copy(self):
        self.check_restore(has_room=False)

    def check_restore(self, *, has_room):
        model, optimizer = make()
        engine = SnapshotEngine(self.config, {"model": model, "optimizer": optimizer})
        with accelerator.little_memory() if not has_room else contextlib.nullcontext():
            snapshot = engine._fetch()
        assert (snapshot.state["model"]["0.weight"].device.type == accelerator.TYPE) == has_room
        model.load_state_dict(snapshot.state["model"])
        optimizer.load_state_dict(snapshot.state["optimizer"])

        assert all(map(torch.equal, values(model, optimizer), self.saved))
        engine.close()
