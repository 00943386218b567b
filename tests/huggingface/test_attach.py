"""One function gives snapshots to an object of a framework that somebody else made."""

import accelerate
import pytest

import lazysnap
from lazysnap.errors import ConfigError


def test_an_accelerator_is_attached_to_in_place(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    assert lazysnap.attach(accelerator, tmp_path) is accelerator
    assert lazysnap.attach(accelerator) is accelerator
    assert isinstance(accelerator, accelerate.Accelerator)
    assert accelerator.statistics() is None


def test_a_second_place_for_an_accelerator_is_refused(tmp_path):
    accelerator = lazysnap.attach(accelerate.Accelerator(cpu=True), tmp_path)
    assert lazysnap.attach(accelerator, str(tmp_path)) is accelerator
    with pytest.raises(ConfigError, match="call attach once"):
        lazysnap.attach(accelerator, tmp_path / "other")


def test_anything_else_is_refused():
    with pytest.raises(ConfigError, match="got int"):
        lazysnap.attach(3)
