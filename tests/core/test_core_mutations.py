"""A rule of the core is left out: the simulated world notices. So it can fail; ``tests/rules`` leaves out many more."""

import pytest
from support.core_world import TIMEOUT_S, Setting, Training, World

from lazysnap.core.messages import LevelSettings, RedundancySettings
from lazysnap.core.node import NodeLevel

LEVEL = LevelSettings("level", every_n_steps=1, keep_last=1, timeout_s=TIMEOUT_S)
REDUNDANCY = RedundancySettings(every_n_steps=2, timeout_s=TIMEOUT_S)
NUM_SEEDS = 8


def run() -> None:
    """Train on two nodes, with a restart in the middle. Raises: AssertionError, if a promise is broken."""
    for seed in range(NUM_SEEDS):
        write_steps = (0.3, 2.0)[seed % 2]
        setting = Setting(
            seed, 2, levels=(LEVEL,), redundancy=REDUNDANCY, loss=0.02, failure=0.02, write_steps=write_steps
        )
        world = World(setting)
        world.run(6.0)
        world.training.die()
        world.run(1.0)
        world.training = Training(world)
        world.run(6.0)
        world.newest_on_disk()


def test_slots_that_go_once_their_own_parity_is_stored_break_a_promise(monkeypatch):
    run()
    monkeypatch.setattr(NodeLevel, "key_to_hold", NodeLevel.wanted_key)
    with pytest.raises(AssertionError, match="was protected, and is so no more"):
        run()
