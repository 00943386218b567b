"""A worker dies under torchrun: the agent starts all again, the keeper stayed, training goes on from memory."""

import json

import pytest
from jobs import HERE
from rank_keepers import keepers
from support.programs import TWO_RANKS, output_of
from support.waiting import until


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_restarts_a_killed_worker_and_training_goes_on_from_memory(make_job, capsys):
    job = make_job(levels=[])
    job.runs = 1
    job.place.mkdir(parents=True)
    names = ("journal", "result")
    settings = {"kind": "ddp", "steps": 8, "levels": [], "linger_s": 200, "by_rank": {"1": {"die_at": 5}}}
    settings |= {name: str(job.place / name) for name in names}
    program = ["--max-restarts", "2", str(HERE / "rank.py"), json.dumps(settings)]
    output_of(*TWO_RANKS, *program, timeout_s=380, LAZYSNAP_JOB_ID=str(job.root))

    events = (job.place / "journal").read_text().splitlines()
    words = [line.split() for line in events]
    assert [line[2:4] for line in words if line[1] == "resumed"] == [["0", "nothing"]] * 2 + [["5", "memory"]] * 2
    [died] = [float(line[3]) for line in words if line[1] == "died"]
    again = [float(line[3]) for line in words if line[1:3] == ["trained", "6"]]
    assert len(again) == 2
    before, after = [{line[3] for line in words if line[1:3] == ["keeper", step]} for step in ("0", "5")]
    assert before == after
    assert len(before) == 1
    until(lambda: keepers(job) == [])
    with capsys.disabled():
        up = max(float(line[3]) for line in words if line[1] == "up")
        print(
            f"\nelastic: training again {max(again) - died:.1f} s after the kill, {max(again) - up:.1f} s after imports"
        )
