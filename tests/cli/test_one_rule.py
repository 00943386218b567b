"""One rule for what is complete, and one way to name a run, for every command and for restarts."""

import re

import pytest
from cli_level import OTHER, RUN, at, put, run, run_json
from support.catalogue import inventory_of
from support.names import START
from support.stored import newest_directory

from lazysnap.levels.store import open_storage
from lazysnap.resolver import candidates

pytestmark = pytest.mark.slow

FIRST, SECOND = "00000000000000aa", "00000000000000bb"
"""Two starts of the same two ranks, which both passed step 10."""
ALIKE = RUN[:9] + "f" * 7
"""A run whose id begins as that of another one."""


def put_ranks(url, *ranks):
    for rank, start in ranks:
        put(url, 10, rank=(rank, 2), start=start)


def complete(url):
    return [plan.key.start for plan in candidates([inventory_of(open_storage(url))])]


def test_parts_of_two_starts_are_no_snapshot(url, capsys):
    put_ranks(url, (0, FIRST), (1, SECOND))
    put(url, 20)
    assert complete(url) == [START]

    result = run_json(capsys, "ls", url)[1]
    halves = [item for item in result["snapshots"] if item["step"] == 10]
    assert [(item["complete"], item["ranks"]) for item in halves] == [(False, 1)] * 2
    assert [item["location"] for item in halves] == [at(10, RUN, FIRST), at(10, RUN, SECOND)]
    code, result = run_json(capsys, "verify", url)
    assert code == 0
    assert [item["state"] for item in result["snapshots"]] == ["incomplete", "incomplete", "good"]
    run("ls", url)
    assert capsys.readouterr().out.count("1 of 2 ranks") == 2
    run("verify", url)
    assert "1 snapshot good, 0 problems, 2 incomplete" in capsys.readouterr().out
    code, result = run_json(capsys, "prune", url, "--keep-last", "1")
    assert [item["step"] for item in result["kept"]] == [10, 10, 20], "for a day: somebody may be copying the rest"
    assert run_json(capsys, "copy", url, f"{url}-2", "--step", "10")[0] == 2


def test_what_an_earlier_start_half_wrote_is_beside_the_complete_one(url, capsys):
    put_ranks(url, (0, FIRST), (0, SECOND), (1, SECOND))
    assert complete(url) == [SECOND]

    result = run_json(capsys, "ls", url)[1]
    assert sorted((item["complete"], item["ranks"]) for item in result["snapshots"]) == [
        (False, 1),
        (True, 2),
    ]
    result = run_json(capsys, "verify", url)[1]
    assert sorted(item["state"] for item in result["snapshots"]) == ["good", "incomplete"]
    assert newest_directory(url) is not None
    # The newest complete one stays; what the first start left counts for nothing.
    code, result = run_json(capsys, "prune", url, "--keep-last", "1", "--yes")
    assert code == 0
    assert complete(url) == [SECOND]
    assert run("copy", url, f"{url}-2", "--step", "latest") == 0
    assert complete(f"{url}-2") == [SECOND]


def test_prune_counts_each_complete_snapshot_of_a_step_that_two_starts_passed(url):
    put_ranks(url, (0, FIRST), (1, FIRST), (0, SECOND), (1, SECOND))
    put(url, 20)

    assert run("prune", url, "--keep-last", "2", "--yes") == 0

    assert complete(url) == [START, SECOND]


def test_ls_shows_runs_by_their_first_digits_and_which_is_the_newest(url, capsys):
    put(url, 10)
    put(url, 5, run_id=OTHER)

    assert run("ls", url) == 0

    out = capsys.readouterr().out
    assert f"newest run: {OTHER[:8]}" in out
    assert RUN[:8] in out
    assert run_json(capsys, "ls", url)[1]["newest_run"] == OTHER


def shows(run_id, text):
    return re.search(rf"\b{run_id[:10]}\b", text)


def test_as_many_digits_are_shown_as_tell_runs_apart(url, capsys):
    put(url, 10)
    put(url, 20, run_id=ALIKE)

    assert run("ls", url) == 0
    out = capsys.readouterr().out
    assert shows(RUN, out)
    assert shows(ALIKE, out)
    assert run("verify", url) == 0
    assert shows(ALIKE, capsys.readouterr().out)
    assert run("prune", url, "--keep-last", "1") == 0
    assert shows(ALIKE, capsys.readouterr().out)


@pytest.mark.parametrize("digits", [RUN[:10].upper(), RUN])
def test_a_run_is_chosen_by_its_first_digits(url, capsys, digits):
    put(url, 10)
    put(url, 20, run_id=ALIKE)
    put(url, 30, run_id=OTHER)

    def of(command, *more):
        code, result = run_json(capsys, command, url, *more, "--run", digits)
        assert code == 0
        return result

    assert [item["step"] for item in of("ls")["snapshots"]] == [10]
    assert [item["step"] for item in of("verify")["snapshots"]] == [10]
    assert of("show", "latest")["run_id"] == RUN
    assert [item["step"] for item in of("copy", f"{url}-2")["snapshots"]] == [10]
    assert {item["step"] for item in of("prune", "--keep-last", "1")["kept"] if item["run_id"] == RUN} == {10}
    run("ls", url, "--run", digits)
    assert shows(RUN, capsys.readouterr().out)


def test_export_takes_the_run_that_was_chosen(url, capsys, tmp_path):
    put(url, 10)
    put(url, 30, run_id=OTHER)
    where = ("--to", tmp_path / "w.safetensors")

    assert run("export", url, "latest", *where, "--run", RUN[:8]) == 0

    assert f"step 10 of run {RUN[:8]} at " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "digits", "what"),
    [
        (["ls"], "1", "no run begins with '1'"),
        (["verify"], RUN[:8], "several runs begin with"),
        (["show", "latest"], "1", "no run begins with '1'"),
        (["copy", "TO"], RUN[:8], "several runs begin with"),
        (["prune", "--keep-last", "1", "--yes"], RUN[:8], "several runs begin with"),
    ],
)
def test_digits_that_mean_no_run_or_several_are_one_error_that_lists_the_runs(url, capsys, words, digits, what):
    put(url, 10)
    put(url, 20, run_id=ALIKE)
    words = [f"{url}-2" if word == "TO" else word for word in words]

    code, result = run_json(capsys, words[0], url, *words[1:], "--run", digits)

    assert code == 2
    assert what in result["error"]
    assert f"{RUN[:10]} (newest step 10)" in result["error"]
    assert f"{ALIKE[:10]} (newest step 20)" in result["error"]
    assert complete(url) == [START, START]
