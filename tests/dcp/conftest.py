"""One process that forks worlds serves all tests of this folder."""

import pytest
from worlds import Worlds


@pytest.fixture(scope="session")
def worlds():
    found = Worlds()
    yield found
    found.close()
