"""On the software device every test runs with delays of a seed of its own, and ends without a report of the checker."""

import zlib

import pytest
import torch
from support import accelerator

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _orders_all_accesses(request):
    software = accelerator.SOFTWARE
    if software is None:
        yield
        return
    software.configure(seed=zlib.crc32(request.node.name.encode()), max_pause_us=200)
    software.races()
    yield
    torch.accelerator.synchronize()
    assert software.races() == []
