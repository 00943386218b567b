"""A training on the software device that is killed at any moment ends as if undisturbed, in every integration."""

import json
import pathlib
import random
import signal

import pytest
from device import software_device
from support.cuts import check_one_line_says_how_it_began, merged, start
from support.zygote import Zygote

SCRIPT = str(pathlib.Path(__file__).with_name("device_trainings.py"))
INTEGRATIONS = ("plain", "rollback", "lightning", "accelerated", "trainer")
DEATHS = 3
_IMPORTED = (
    "support.accelerator",  # registers the device, which no child may have used before
    "torch._dynamo",
    "torch.nn.parallel",
    "accelerate",
    "lightning.pytorch",
    "transformers.trainer",
    "lazysnap.engine.engine",
    "lazysnap.integrations.accelerate",
    "lazysnap.integrations.lightning",
    "lazysnap.integrations.transformers",
)


@pytest.fixture(scope="module")
def on_device():
    """Starts trainings that use the software device."""
    try:
        software_device.built()
    except software_device.CannotBuild as error:
        pytest.skip(str(error))
    zygote = Zygote(_IMPORTED, {"LAZYSNAP_TEST_DEVICE": "software"})
    yield zygote
    zygote.close()


@pytest.mark.timeout(software_device.BUILD_DEADLINE_S + 300)
@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_killed_at_any_turn_of_the_device_a_training_ends_bit_for_bit_as_undisturbed(on_device, tmp_path, integration):
    draw = random.Random(integration)

    def run(name, dies_at, seed):
        return start(on_device, [SCRIPT, str(tmp_path / name), integration, str(dies_at), str(seed)], tmp_path / name)

    undisturbed = run("undisturbed", 0, 1)
    assert undisturbed.status == 0, undisturbed.text
    whole = undisturbed.lines
    steps = max(line.get("step", 0) for line in whole)
    turns_of_a_step = int((tmp_path / "undisturbed" / "turns").read_text()) // steps
    # The first death is behind captures, as a start that finds none must have the seed of the undisturbed run.
    deaths = [4 * turns_of_a_step + draw.randrange(turns_of_a_step)]
    deaths += [turns_of_a_step // 4 + draw.randrange(2 * turns_of_a_step) for _ in range(DEATHS - 1)]

    trace, done = [], 0
    for number, dies_at in enumerate([*deaths, 0]):
        # A death behind the last step would leave nothing to train.
        has_room = done <= steps - 4
        begun = run("cut", dies_at if has_room else 0, number + 1)
        check_one_line_says_how_it_began(begun)
        resumed = begun.head["resumed"] or 0
        # One step may lie on the device that the host is ahead of; what is captured behind it died with it.
        assert resumed >= done - 2 or not number, begun.text
        trace = merged(trace, resumed, begun.lines)
        done = max((line.get("step", 0) for line in trace), default=0)
        assert trace == whole[: len(trace)], begun.text
        if begun.status == 0:
            break
        assert begun.status == -signal.SIGKILL, begun.text
    assert trace == whole
    assert number >= 2
    reports = (tmp_path / "cut" / "races").read_text().splitlines()
    assert [line for line in reports if not line.startswith("{")] == []
    assert all(json.loads(line)["turns"] in deaths for line in reports)
