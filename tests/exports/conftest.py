import pytest
from worlds import Worlds


@pytest.fixture(scope="session")
def worlds(zygote):
    return Worlds(zygote)
