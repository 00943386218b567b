"""Every test of this folder gets a job of its own, and leaves nothing running."""

import pytest
from small_training import Starter


@pytest.fixture
def other_job():
    starter = Starter()
    yield starter
    starter.clean_up()


@pytest.fixture
def job():
    starter = Starter()
    yield starter
    starter.clean_up()
