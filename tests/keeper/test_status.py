"""``lazysnap status``: what it shows of keepers that live, store, fail, hang or belong to others."""

import contextlib
import json
import os
import pathlib
import re
import struct
import subprocess
import threading

import pytest
from msgspec.structs import replace
from support.keepers import stopped
from support.names import START
from support.waiting import until

from lazysnap.cli import main
from lazysnap.cli.keepers import of_this_node
from lazysnap.cli.survival import file_system_of, survival
from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import PROTOCOL
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.questions import LevelFacts, NodeState
from lazysnap.warm.directories import ENVIRONMENT

SHELL = ["/bin/sh", "-c", "read line", "-m", "lazysnap.keeper", "--job=a", "--node=b", "--socket=00"]
"""A process that looks like a keeper in lists of processes."""


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Paths of temporary directories are long: tables shall not wrap because of them."""
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def status(capsys):
    """Exit code and JSON of the command."""

    def ask(*words):
        capsys.readouterr()
        code = main(["status", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return ask


@pytest.fixture
def of_job(status, job):
    """The one job that the command shows, once a training began there."""

    def ask(is_so=lambda found: True):
        def look():
            jobs = status(job.job_id)[1]["jobs"]
            return jobs and jobs[0]["ranks"] and is_so(jobs[0]) and jobs[0]

        return until(look)

    return ask


@pytest.mark.slow
def test_a_training_that_runs_is_found_without_its_name(job, status, of_job, capsys):
    trainer = job.trainer(levels=[job.level()])
    for step in (1, 2, 3):
        trainer.capture(step=step, must=step == 3)
    found = of_job(lambda found: found["levels"][0]["newest_step"] == 3)

    assert job.job_id in [one["job"] for one in status()[1]["jobs"]]
    survives = {name: outcome["safe"]["step"] for name, outcome in found["survives"].items()}
    # The level is on a disk of this node, which a lost node may take along.
    assert survives == {"process": 3, "keeper": 3, "process_and_keeper": 3, **dict.fromkeys(LOST_NODES)}
    assert all(found["survives"][name]["if_disks_stay"]["step"] == 3 for name in LOST_NODES)
    [rank] = found["ranks"]
    assert (rank["training"], rank["pid"], rank["step"]) == (True, trainer.process.pid, 3)
    assert rank["slots"] == 3
    assert rank["memory_bytes"] >= 3 * 100_000
    assert rank["steps_per_s"] > 0
    assert 0 <= found["levels"][0]["age_s"] <= 60
    assert found["levels"][0]["bytes_per_s"] > 0
    assert found["problems"] == []
    assert main(["status", job.job_id]) == 0
    shown = capsys.readouterr().out
    assert "training continues with a new keeper" in shown
    assert len(shown.splitlines()) <= 24


LOST_NODES = ("node", "two_nodes", "all_nodes")


@pytest.mark.slow
def test_after_the_death_of_its_trainer_the_keeper_says_what_memory_still_has(job, of_job, capsys):
    """The level takes every 1000th step alone, and the last one once nobody trains: here nothing, it is a file."""
    level = job.level(every_n_steps=1000)
    pathlib.Path(level["url"]).write_text("in the way")
    trainer = job.trainer(levels=[level])
    for step in (1, 2):
        trainer.capture(step=step)
    trainer.begin(step=3)
    trainer.kill()

    found = of_job(lambda found: not found["ranks"][0]["training"])

    survives = {name: outcome["safe"] for name, outcome in found["survives"].items()}
    assert survives.pop("process") == {"step": 2, "source": "memory"}
    assert all(outcome == {"step": None, "source": None} for outcome in survives.values())
    [rank] = found["ranks"]
    assert (rank["step"], rank["captured_step"], rank["steps_per_s"]) == (3, 2, None)
    assert 0 < rank["memory_stays_s"] <= 30
    main(["status", job.job_id])
    shown = capsys.readouterr().out
    assert f"process {trainer.process.pid} ended" in shown
    assert "the process (it ended)" in shown


@pytest.mark.slow
def test_a_level_that_fails_shows_failure_and_queue_until_it_works_again(job, status, of_job, capsys):
    level = job.level()
    place = pathlib.Path(level["url"])
    place.write_text("in the way")
    trainer = job.trainer(levels=[level])
    trainer.capture(step=1, must=True)

    found = of_job(lambda found: found["levels"][0]["failure"])

    [shown] = found["levels"]
    assert shown["is_failing"]
    assert (shown["newest_step"], shown["waiting_steps"], shown["age_s"]) == (None, 1, None)
    assert level["url"] in shown["failure"]
    assert shown["failure_age_s"] >= 0
    assert status(job.job_id)[0] == 1
    assert main(["status", job.job_id]) == 1
    assert f"{level['url']} fails: " in capsys.readouterr().out

    place.unlink()
    found = of_job(lambda found: found["levels"][0]["newest_step"] == 1 and not found["levels"][0]["is_failing"])

    assert found["levels"][0]["failure"] == shown["failure"]
    assert main(["status", job.job_id]) == 0
    assert re.search(rf"last failure of {level['url']}, .* ago: ", capsys.readouterr().out)
    assert status(job.job_id)[0] == 0


@pytest.mark.slow
def test_what_is_being_stored_is_shown_with_its_progress(job, of_job):
    # The first block passes at once, the second one waits for more than a minute.
    trainer = job.trainer(levels=[job.level(max_bytes_per_s=200_000)], size=20_000_000)
    trainer.capture(step=7, must=True)

    [level] = of_job(lambda found: found["levels"][0]["storing_step"] == 7)["levels"]

    assert 0 <= level["moved_bytes"] <= level["total_bytes"] == 20_004_096


@pytest.mark.slow
def test_a_keeper_of_another_version_is_not_to_be_killed_before_it_has_stored(capsys):
    lock = JobIdentity.from_config(SnapshotConfig(job_id="older")).files.try_lock()
    with contextlib.closing(lock), lock.bind() as listener:
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(struct.pack("<IHH", 0, PROTOCOL + 1, 0))

        keeper = threading.Thread(target=answer)
        keeper.start()
        assert main(["stop", "older", "--json"]) == 1
        keeper.join()
        lock.remove()

    (staying,) = json.loads(capsys.readouterr().out)["staying"]
    assert f"`kill {os.getpid()}` ends it: it stores what it holds first" in staying["reason"]


def test_a_keeper_that_is_stopped_is_one_line_within_the_deadline(job, status, capsys):
    trainer = job.trainer()
    trainer.capture(step=1)
    whole = set(status(job.job_id)[1]["jobs"][0])
    keeper = job.keeper_pid()
    with stopped(keeper):
        code, said = status(job.job_id)
        main(["status", job.job_id])
        lines = capsys.readouterr().out.split("\n")

    text = f"keeper {keeper} does not answer within 2 s: it is stopped; `kill -CONT {keeper}` resumes it"
    assert code == 1
    [found] = said["jobs"]
    assert (found["answers"], found["problems"]) == (False, [text])
    assert set(found) == whole
    assert [line for line in lines if line] == [f"job {job.job_id}", text]
    assert trainer.capture(step=2)


@pytest.mark.slow
def test_a_keeper_in_another_runtime_directory_is_counted_and_not_touched(
    make_job, status, monkeypatch, runtime_directory
):
    with monkeypatch.context() as other:
        other.setenv(ENVIRONMENT, runtime_directory)
        job = make_job()
        trainer = job.trainer()
        assert job.keeper_pid()
    [keeper] = [found for found in of_this_node() if found.identity.job_id == job.job_id]

    _, said = status()

    assert not keeper.is_reachable
    assert keeper.pid in said["not_asked"]
    assert job.job_id not in [one["job"] for one in said["jobs"]]
    assert trainer.capture(step=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_no_keeper_of_this_one(status):
    with (
        subprocess.Popen(SHELL, stdin=subprocess.PIPE) as own,
        subprocess.Popen(SHELL, stdin=subprocess.PIPE, user=65534) as others,
    ):
        _, said = status()

    assert own.pid in said["not_asked"]
    assert others.pid not in said["not_asked"]


@pytest.mark.slow
def test_prometheus_gets_the_numbers_of_the_json(job, of_job, status, capsys):
    """The line format: https://prometheus.io/docs/instrumenting/exposition_formats."""
    level = job.level()
    trainer = job.trainer(levels=[level])
    for step in (1, 2, 3):
        trainer.capture(step=step, must=step == 3)
    of_job(lambda found: found["levels"][0]["newest_step"] == 3)

    assert main(["status", job.job_id, "--prometheus"]) == 0
    text = capsys.readouterr().out

    samples = {}
    for line in text.splitlines():
        if not line.startswith("# TYPE "):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
            samples[name, labels] = float(value)
    names = [name for name, _ in samples]
    assert names == sorted(names, key=names.index), "the samples of a figure follow one another"
    assert [line.split()[2:] for line in text.splitlines() if line.startswith("#")] == [
        [name, "gauge"] for name in dict.fromkeys(names)
    ]
    of = f'job="{job.job_id}"'
    assert samples["lazysnap_answers", of] == 1
    assert samples["lazysnap_problems", of] == 0
    assert samples["lazysnap_rank_step", f'{of},rank="0"'] == 3
    assert samples["lazysnap_rank_training", f'{of},rank="0"'] == 1
    assert samples["lazysnap_level_newest_step", f'{of},level="{level["url"]}"'] == 3
    assert samples["lazysnap_survives_step", f'{of},loss="process"'] == 3
    assert ("lazysnap_survives_step", f'{of},loss="node"') not in samples, "what is unknown is absent"
    assert status(job.job_id, "--prometheus")[0] == 2


def test_where_nothing_runs_the_command_says_so_and_what_to_look_at(status, monkeypatch, capsys, runtime_directory):
    monkeypatch.setenv(ENVIRONMENT, runtime_directory)

    code, said = status()

    assert (code, said["jobs"]) == (0, [])
    assert main(["status"]) == 0
    assert "`lazysnap ls URL`" in capsys.readouterr().out


@pytest.mark.slow
def test_of_several_ranks_memory_holds_what_all_of_them_hold(job, of_job):
    first, second = (job.trainer(rank=(rank, 2), start=START, kept=2) for rank in (0, 1))
    for step in (1, 2):
        first.capture(step=step)
    second.capture(step=1)

    found = of_job(lambda found: [rank["step"] for rank in found["ranks"]] == [2, 1])

    assert found["survives"]["process"]["safe"] == {"step": 1, "source": "memory"}


LEVEL = LevelFacts("/own", False, 30, None, None, None, 0, 0, 0, False, "", None)
NODES = NodeState("ab" * 8, 0, 4, 40, 35, 1, 0, [], [LEVEL], [])
"""Node 0 of four. Each stores at its own disk; memory of one node may be lost."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [35, None, None]),
        ({"may_lose": 2}, [35, 35, None]),
        ({"protected": None}, [None, None, None]),
        ({"protected": 0}, [0, None, None]),
        ({"levels": [LEVEL, replace(LEVEL, url="/all", is_shared=True, newest=20)]}, [35, 20, 20]),
        ({"levels": [LEVEL, replace(LEVEL, url="s3://bucket/run", newest=36)]}, [36, 36, 36]),
        ({"nodes": 1, "may_lose": 0}, [None, None, None]),
        ({"nodes": 1, "levels": [replace(LEVEL, is_shared=True)]}, [None, None, None]),
    ],
    ids=str,
)
def test_what_survives_lost_nodes_is_their_parity_or_at_a_place_that_outlives_them(changes, expected):
    found = survival(replace(NODES, **changes))

    assert [found[name].safe.step for name in LOST_NODES] == expected
    assert all(found[name].if_disks_stay.step in (None, 30) for name in LOST_NODES)


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:35 / /mnt/team rw - nfs4 server:/team rw
41 22 0:36 / /mnt/team\040runs rw - nfs4 server:/runs rw
42 41 8:2 / /mnt/team\040runs/scratch\011a rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me", "ext4"),
        ("/mnt/team/me", "nfs4"),
        ("/mnt/team runs/me", "nfs4"),
        ("/mnt/team runs/scratch\ta/me", "xfs"),
        ("/mnt/teams", "ext4"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_longest_mount_point(path, expected):
    assert file_system_of(path, MOUNTS) == expected


@pytest.mark.slow
def test_the_keys_of_the_result_are_those_that_the_page_has(job, of_job):
    trainer = job.trainer(levels=[job.level()])
    trainer.capture(step=1)
    found = of_job()
    page = pathlib.Path(__file__).parents[2] / "docs" / "cli.md"
    rows = re.search(r"\n\| `status` \|.*?(?=\n\| `report` \|)", page.read_text(), re.DOTALL)
    documented = set(re.findall(r"`(\w+)`", rows[0])) - {"status"}

    keys = {*found, *found["survives"], *found["survives"]["node"], *found["levels"][0], *found["ranks"][0]}
    assert documented == keys | {"jobs", "not_asked", *found["survives"]["node"]["safe"]}
