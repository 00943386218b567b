"""torchrun on two hosts: a worker of one dies, both agents start theirs again, all go on from the memory of each."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from jobs import HERE
from netns_nodes import Nodes, why_not
from support.waiting import until

TIMEOUT_S = 400


def launch(nodes, number, settings, place, environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes.ADDRESSES[0]}:29400"]
    command += ["--rdzv-id", "two", "--rdzv-conf", f"join_timeout=120,last_call_timeout=2,is_host={number == 0}"]
    command += ["--local-addr", nodes.ADDRESSES[number], str(HERE / "rank.py"), json.dumps(settings)]
    with (place / f"agent.{number}").open("w") as output:
        return nodes.start(number, command, env=environment, stdout=output, stderr=output)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_killed_worker_costs_two_hosts_no_step_and_each_finds_its_own_memory(tmp_path):
    settings = {"kind": "hsdp", "steps": 8, "levels": [], "linger_s": 200, "by_rank": {"1": {"die_at": 5}}}
    settings |= {name: str(tmp_path / name) for name in ("journal", "result")}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "LAZYSNAP_JOB_ID": str(tmp_path),
        # Without it the restarted workers of several nodes meet at the addresses of the dead ones, and never start.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with Nodes() as nodes, contextlib.ExitStack() as ends:
        agents = [launch(nodes, number, settings, tmp_path, environment) for number in (0, 1)]
        for agent in agents:
            ends.callback(agent.kill)
        try:
            codes = [agent.wait(TIMEOUT_S) for agent in agents]
        except subprocess.TimeoutExpired:
            codes = [agent.poll() for agent in agents]
        output = "\n".join((tmp_path / f"agent.{number}").read_text()[-3000:] for number in (0, 1))
        assert codes == [0, 0], output
        until(lambda: [nodes.processes(number) for number in (0, 1)] == [[], []], lambda: "a keeper is left")

    words = [line.split() for line in (tmp_path / "journal").read_text().splitlines()]
    assert [line[2:4] for line in words if line[1] == "resumed"] == [["0", "nothing"]] * 4 + [["5", "memory"]] * 4
    before, after = [{line[3] for line in words if line[1:3] == ["keeper", step]} for step in ("0", "5")]
    assert before == after
    assert len(before) == 2, "one on each node"
