"""Promises of ``lazysnap prune``."""

import fsspec
import pytest
from cli_level import (
    MANIFEST,
    OTHER,
    RUN,
    SHARD,
    at,
    change,
    files,
    flip,
    put,
    remove,
    run,
    run_json,
)
from rich.filesize import decimal
from support.catalogue import inventory_of

from lazysnap.cli.prune import _Plan
from lazysnap.levels.store import keep, open_storage

pytestmark = pytest.mark.slow


def steps(url: str, run_id: str = RUN) -> list[int]:
    return sorted(entry.step for entry in inventory_of(open_storage(url)).entries if entry.run_id == run_id)


@pytest.fixture
def five(url):
    for step in (10, 20, 30, 40, 50):
        put(url, step)
    return url


def test_without_options_no_snapshot_goes(five, capsys):
    before = files(five)
    code, result = run_json(capsys, "prune", five, "--yes")
    assert code == 0
    assert result["snapshots"] == []
    assert [item["step"] for item in result["kept"]] == [10, 20, 30, 40, 50]
    assert files(five) == before


def test_keep_last_and_keep_every_leave_what_retention_would(five, capsys):
    code, result = run_json(capsys, "prune", five, "--keep-last", "1", "--keep-every", "20", "--yes")
    assert code == 0
    assert [item["step"] for item in result["snapshots"]] == [10, 30]
    assert steps(five) == [20, 40, 50]
    assert not [path for path in files(five) if path.startswith((at(10), at(30)))]


def test_without_yes_it_tells_the_same_and_deletes_nothing(five, capsys):
    before = files(five)
    code, result = run_json(capsys, "prune", five, "--keep-last", "2")
    assert code == 0
    assert [item["step"] for item in result["snapshots"]] == [10, 20, 30]
    assert result["deleted"] == []
    assert files(five) == before
    assert run("prune", five, "--keep-last", "2") == 0
    assert "nothing was deleted: --yes deletes" in capsys.readouterr().out


def test_what_has_a_name_stays_until_the_name_is_taken_from_it(url, capsys):
    put(url, 10, names=("best", "first"))
    put(url, 20, names=("best",))
    put(url, 30)
    result = run_json(capsys, "prune", url, "--keep-last", "1", "--yes")[1]
    assert steps(url) == [10, 20, 30]
    assert {item["step"]: item["because"] for item in result["kept"]} == {
        10: "named",
        20: "named",
        30: "newest complete",
    }
    assert run_json(capsys, "prune", url, "--name", "best")[1]["unnamed"]
    assert len([path for path in files(url) if "keep-best" in path]) == 2
    assert run("prune", url, "--name", "best", "--keep-last", "1", "--yes") == 0
    assert steps(url) == [10, 30]
    assert not [path for path in files(url) if "keep-best" in path]


def test_a_name_that_nothing_has_is_exit_code_2(five):
    assert run("prune", five, "--name", "nix", "--yes") == 2


def test_the_newest_complete_one_stays_though_half_ones_are_newer(url, capsys):
    put(url, 10)
    put(url, 20, rank=(0, 2))
    run("prune", url, "--keep-last", "1", "--yes")
    assert steps(url) == [10, 20]


def test_a_half_one_that_is_older_than_a_sound_one_goes_with_keep_last_only_and_when_it_is_old(url, request):
    put(url, 10, rank=(0, 2))
    put(url, 20)
    run("prune", url, "--yes")
    assert steps(url) == [10, 20]
    run("prune", url, "--keep-last", "1", "--yes")
    assert steps(url) == [10, 20]  # somebody may just be copying the rest of it
    request.getfixturevalue("a_day_later")
    run("prune", url, "--keep-last", "1", "--yes")
    assert steps(url) == [20]


def test_nothing_is_deleted_in_favour_of_a_damaged_snapshot(five, capsys):
    change(five, f"{at(50)}/{SHARD}", flip(0.99))
    code, result = run_json(capsys, "prune", five, "--keep-last", "1", "--yes")
    assert code == 1
    assert steps(five) == [40, 50]
    assert "step 50 does not count" in result["problems"][0]


def test_newer_damaged_snapshots_do_not_count_however_many_there_are(five, capsys):
    change(five, f"{at(40)}/{SHARD}", lambda data: data.pop())
    remove(five, f"{at(50)}/{SHARD}")

    code, _ = run_json(capsys, "prune", five, "--keep-last", "1", "--yes")

    assert code == 1
    assert {30} <= {*steps(five)} <= {30, 40}


def test_other_runs_are_left_alone_if_one_is_named(url):
    for step in (10, 20):
        put(url, step)
        put(url, step, run_id=OTHER)
    assert run("prune", url, "--run", RUN[:8], "--keep-last", "1", "--yes") == 0
    assert (steps(url), steps(url, OTHER)) == ([20], [10, 20])
    assert run("prune", url, "--keep-last", "1", "--yes") == 0
    assert (steps(url), steps(url, OTHER)) == ([20], [20])


def test_what_dead_writers_left_goes(make_url, capsys, a_day_later):
    url = make_url("local")
    put(url, 10)
    put(url, 20)
    remove(url, f"{at(20)}/{MANIFEST}")
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.makedirs(f"{root}/{at(30)}")
    temporary = f"{at(30)}/.{SHARD}.tmp-123-0123abcd"
    filesystem.pipe_file(f"{root}/{temporary}", b"half")
    result = run_json(capsys, "prune", url)[1]
    assert sorted(result["leftovers"]) == [f"{at(20)}/{SHARD}", temporary]
    code, result = run_json(capsys, "prune", url, "--yes")
    assert code == 0
    assert sorted(result["deleted"]) == [f"{at(20)}/{SHARD}", temporary]
    assert files(url) == [f"{at(10)}/{MANIFEST}", f"{at(10)}/{SHARD}"]


def test_what_a_living_writer_writes_stays(make_url, capsys):
    url = make_url("local")
    put(url, 10)
    writer = open_storage(url).create(f"{at(20)}/{SHARD}", 4096)
    try:
        assert run("prune", url, "--keep-last", "1", "--yes") == 0
        assert len([path for path in files(url) if path.startswith(at(20))]) == 1
    finally:
        writer.close()


def test_what_stays_since_somebody_named_it_meanwhile_is_not_said_to_be_freed(five, monkeypatch, capsys):
    show = _Plan.show

    def name_and_show(plan: _Plan) -> None:
        storage = open_storage(five)
        keep(storage, inventory_of(storage).entries[0].snapshot, "best")
        show(plan)

    named = inventory_of(open_storage(five)).entries[0].step
    monkeypatch.setattr(_Plan, "show", name_and_show)
    assert run("prune", five, "--keep-last", "1", "--yes") == 0
    printed = capsys.readouterr()
    assert steps(five) == sorted({named, 50})
    assert "stays: meanwhile it has a name" in printed.err
    assert f"3 deleted, {decimal(3 * (4096 + 4000))} of snapshots freed" in printed.out


@pytest.mark.parametrize(
    "words",
    [["--keep-every", "5", "--yes"], ["--keep-last", "0", "--yes"], ["--keep-last", "-1", "--yes"]],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(five, words):
    assert run("prune", five, *words) == 2
    assert len(steps(five)) == 5
