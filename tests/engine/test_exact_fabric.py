"""Under Lightning Fabric a plain loop that is killed in the middle of a step goes on as if nothing had happened."""

import signal
from pathlib import Path

import pytest
from support.cuts import check_every_cut, launch, merged
from support.ports import free_port

SCRIPT = str(Path(__file__).with_name("looped.py"))
RANKS = 2


@pytest.mark.slow
def test_killed_in_every_second_step_it_ends_bit_for_bit_as_uninterrupted(zygote, tmp_path):
    check_every_cut(zygote, SCRIPT, "UnderFabricWithWorkers", tmp_path, stride=2)


def start_ranks(zygote, directory, dies_at, seed):
    """Start all ranks, each in a process, as torchrun does."""
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}
    common |= {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "LAZYSNAP_JOB_ID": directory}
    running = []
    for rank in range(RANKS):
        env = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        suffix = "" if rank == 0 else f".{rank}"
        arguments = [SCRIPT, str(directory), "UnderFabric", str(dies_at), str(seed + rank)]
        running.append(launch(zygote, arguments, directory, env, suffix))
    return [one.wait() for one in running]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_two_ranks_with_ddp_that_are_killed_end_bit_for_bit_as_uninterrupted(zygote, tmp_path):
    begun = start_ranks(zygote, tmp_path / "whole", 0, 1)
    assert [one.status for one in begun] == [0, 0], begun[0].text
    wholes = [one.lines for one in begun]
    assert [line["ids"] for line in wholes[0][:3]] != [line["ids"] for line in wholes[1][:3]]

    traces = [[], []]
    for number, dies_at in enumerate((2, 5, 0)):
        begun = start_ranks(zygote, tmp_path / "cut", dies_at, 1 + 10 * number)
        assert [one.status for one in begun] == [-signal.SIGKILL if dies_at else 0] * RANKS, begun[0].text
        [resumed] = {one.head["resumed"] for one in begun}
        assert (resumed is None) == (dies_at == 2), begun[0].text
        traces = [merged(trace, resumed, one.lines) for trace, one in zip(traces, begun, strict=True)]
        assert traces == [whole[: len(trace)] for whole, trace in zip(wholes, traces, strict=True)], begun[0].text
    assert traces == wholes
