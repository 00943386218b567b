"""Promises of ``lazysnap ls`` and ``lazysnap verify``."""

import os
import subprocess
import sys

import pytest
from cli_level import (
    MANIFEST,
    OTHER,
    RUN,
    SHARD,
    at,
    change,
    flip,
    put,
    remove,
    run,
    run_json,
)


def test_ls_lists_complete_half_and_uncommitted_snapshots_as_what_they_are(url, capsys):
    for step in (10, 20):
        put(url, step)
    put(url, 30, rank=(1, 2))
    put(url, 40)
    remove(url, f"{at(40)}/{MANIFEST}")

    code, result = run_json(capsys, "ls", url)

    assert code == 0
    found = {item["step"]: item for item in result["snapshots"]}
    assert [(step, item["complete"]) for step, item in sorted(found.items())] == [
        (10, True),
        (20, True),
        (30, False),
        (40, False),
    ]
    assert (found[30]["ranks"], found[30]["world_size"]) == (1, 2)
    assert found[40]["run_id"] is None
    assert found[10]["size_bytes"] == 8096
    assert result["problems"] == []


def test_ls_tells_names_and_runs(url, capsys):
    put(url, 10, names=("before-anneal", "best"))
    put(url, 20)
    put(url, 20, run_id=OTHER)

    code, result = run_json(capsys, "ls", url)

    assert code == 0
    assert sorted(item["run_id"] for item in result["snapshots"]) == [RUN, RUN, OTHER]
    by_place = {item["location"]: item for item in result["snapshots"]}
    assert len(by_place) == 3
    assert by_place[at(10)]["names"] == ["before-anneal", "best"]
    assert by_place[at(20)]["names"] == []


def test_ls_shows_a_table_and_the_problems_below_it(url, capsys):
    put(url, 10, names=("best",))
    put(url, 20)
    change(url, f"{at(20)}/{MANIFEST}", flip(0.5))
    assert run("ls", url) == 0
    out = capsys.readouterr().out
    assert "complete" in out
    assert "best" in out
    assert at(20) in out
    assert "the manifest is damaged" in out


def test_ls_of_an_empty_place_says_so(url, capsys):
    if "://" not in url:
        os.mkdir(url)
    assert run("ls", url) == 0
    assert "no snapshots" in capsys.readouterr().out


def test_verify_of_good_snapshots_succeeds_and_counts_their_bytes(url, capsys):
    put(url, 10)
    put(url, 20)

    assert run("verify", url) == 0
    assert "2 snapshots good, 0 problems" in capsys.readouterr().out

    code, result = run_json(capsys, "verify", url)
    assert (code, result["ok"]) == (0, True)
    assert [item["state"] for item in result["snapshots"]] == ["good", "good"]
    assert result["size_bytes"] == 2 * (4096 + 4000)


@pytest.mark.parametrize("columns", [80, 250])
def test_names_are_whole_on_any_screen(url, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "before-the-annealing-of-the-learning-rate-2026"
    put(url, 10, names=(name,))
    for words in (["ls", url], ["prune", url]):
        assert run(*words) == 0
        assert name in capsys.readouterr().out


@pytest.mark.parametrize(("name", "where"), [(SHARD, 0), (SHARD, 0.999), (MANIFEST, 0.5)])
def test_verify_finds_and_names_a_flipped_byte_in_any_file(url, capsys, name, where):
    put(url, 10)
    put(url, 20)
    change(url, f"{at(10)}/{name}", flip(where))

    assert run("verify", url) == 1

    out = capsys.readouterr().out
    assert f"{at(10)}/{name}" in out
    assert "1 snapshot good, 1 problem" in out


@pytest.mark.parametrize("change_it", ["cut", "removed"])
def test_verify_finds_and_names_a_shard_that_is_short_or_gone(url, capsys, change_it):
    put(url, 20)
    if change_it == "cut":
        change(url, f"{at(20)}/{SHARD}", lambda data: data.pop())
    else:
        remove(url, f"{at(20)}/{SHARD}")
    assert run("verify", url) == 1
    assert at(20) in capsys.readouterr().out


def test_verify_of_one_step_reads_that_one_alone(url, capsys):
    put(url, 10)
    put(url, 20)
    put(url, 30)
    change(url, f"{at(20)}/{SHARD}", flip(0.99))
    change(url, f"{at(30)}/{MANIFEST}", flip(0.5))

    assert run_json(capsys, "verify", url, "--step", "10")[0] == 0
    assert run_json(capsys, "verify", url, "--step", "20")[0] == 1
    assert run_json(capsys, "verify", url, "--step", "30")[0] == 1
    assert run_json(capsys, "verify", url, "--step", "10", "--step", "20")[0] == 1
    code, result = run_json(capsys, "verify", url, "--step", "99")
    assert code == 2
    assert "no snapshot of step 99" in result["error"]


def test_an_incomplete_snapshot_is_not_bad_but_said(url, capsys):
    put(url, 10, rank=(0, 2))
    code, result = run_json(capsys, "verify", url)
    assert code == 0
    assert result["snapshots"][0]["state"] == "incomplete"


@pytest.mark.parametrize("ranks", [1, 2])
def test_verify_names_the_file_of_a_newer_snapshot_whose_manifest_is_deleted(url, capsys, ranks):
    put(url, 10)
    if ranks == 1:
        put(url, 20)
    else:
        put(url, 20, rank=(0, 2))
        put(url, 20, rank=(1, 2))
    shard = f"{at(20)}/node-{ranks - 1:05}-of-{ranks:05}.safetensors"
    remove(url, shard.replace(".safetensors", ".json"))

    assert run("verify", url) == 0

    out = capsys.readouterr().out
    assert f"incomplete: step 20 is not complete: {url}/{shard} has no manifest" in out
    assert "1 snapshot good, 0 problems, 1 incomplete or gone" in out
    assert [shard in text for text in run_json(capsys, "verify", url)[1]["without_manifest"]] == [True]
    code, result = run_json(capsys, "verify", url, "--step", "20")
    assert shard in result["without_manifest"][0]
    assert code == int(ranks == 1), "of a step that no manifest is there of nothing was verified"


def test_verify_of_nothing_is_no_success(url):
    if "://" not in url:
        os.mkdir(url)
    assert run("verify", url) == 1


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_an_unknown_protocol_is_one_clear_line_and_exit_code_2(capsys, command):
    assert run(command, "nosuchprotocol://bucket/run") == 2
    assert "nosuchprotocol" in capsys.readouterr().err
    code, result = run_json(capsys, command, "nosuchprotocol://bucket/run", *["--yes"] * (command == "prune"))
    assert (code, result["ok"]) == (2, False)
    assert "nosuchprotocol" in result["error"]


@pytest.mark.parametrize(
    "command",
    [["ls"], ["verify"], ["show", "latest"], ["prune"], ["copy", "/tmp/to"], ["export", "1", "--to", "x.ckpt"]],
)
def test_a_directory_that_is_not_there_is_exit_code_2(tmp_path, capsys, command):
    (tmp_path / "file").write_text("")
    for name, why in (("nowhere", "does not exist"), ("file", "is not a directory")):
        assert run(command[0], tmp_path / name, *command[1:]) == 2
        assert f"{name} {why}" in capsys.readouterr().err


def test_a_place_that_cannot_be_listed_is_exit_code_2(tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    code, result = run_json(capsys, "ls", str(tmp_path / "loop" / "run"))
    assert code == 2
    assert result["ok"] is False


@pytest.mark.slow
def test_whatever_needs_no_torch_imports_none(make_url, tmp_path):
    url = make_url("local")
    put(url, 10)
    code = """
import sys
from lazysnap.cli import main
url, to, file = sys.argv[1:]
for words in (["ls", url], ["verify", url], ["show", url, "latest"], ["prune", url, "--yes", "--keep-last", "1"],
              ["copy", url, to], ["export", url, "latest", "--to", file]):
    assert main(words) == 0, words
    assert not {"torch", "numpy", "lightning"} & set(sys.modules), words
"""
    words = [sys.executable, "-c", code, url, str(tmp_path / "copy"), str(tmp_path / "w.safetensors")]
    ran = subprocess.run(words, timeout=60, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "w.safetensors").exists()
