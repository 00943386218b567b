"""Tensors that are not trained, with several ranks. In another world: ``test_other_world.py``."""

import pathlib

import pytest
import torch
from rank import Net

from lazysnap import load_weights


@pytest.mark.parametrize("who", ["all ranks", "one rank"])
def test_a_base_that_is_changed_all_the_same_comes_back_as_it_was_on_each_rank(job, who):
    """Also where the ranks do not change it alike. Not with HSDP: of replicated shards, as in DCP, one is stored."""
    changing = {"averaged": True} if who == "all ranks" else {"by_rank": {"1": {"averaged": True}}}
    assert set(job.run("ddp", 2, base=True, stop_at=6, wait_durable=True, **changing)) == {9}, job.output()
    stopped = {rank: digest for rank, _, _, digest, *_ in job.events("stopped")}

    assert set(job.run("ddp", 2, base=True, look=True)) == {0}, job.output()

    assert job.resumed() == 6
    assert {rank: digest for rank, _, _, _, digest, *_ in job.events("resumed")} == stopped


def test_weights_of_a_sharded_base_are_read_whole(job):
    assert set(job.run("fsdp", 2, base=True, stop_at=4, wait_durable=True)) == {9}, job.output()
    torch.manual_seed(0)
    wanted = Net(base=True).base

    found = load_weights(pathlib.Path(job.levels[0]["url"]))

    assert found["base.weight"].equal(wanted.weight)
    assert found["base.bias"].equal(wanted.bias)
