"""Promises of ``lazysnap show``."""

from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from cli_level import OTHER, SHARD, at, change, flip, put, run, run_json


def state(step: int = 10) -> dict:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "base": {"w": torch.ones(500, dtype=torch.bfloat16)},
        "model": {"w": weight, "tied": weight, "z": torch.zeros(2, 3, dtype=torch.complex128)},
        "small": {
            "pair": (1, 2),
            "text": "x" * 500,
            "many": list(range(600)),
            "keys": {1: "one", "1": "also one"},
            "ordered": OrderedDict(a=1),
            "queue": deque([1, 2], maxlen=3),
            "array": np.arange(3),
            "nothing": {},
            "bytes": b"12345",
        },
        "step": step,
    }


@pytest.fixture
def shown(url):
    put(url, 10, state(), names=("best",))
    return url


def test_the_summary_fits_a_screen_and_says_what_the_state_has(shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run("show", shown, "latest") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["names"] == ["best"]
    assert rows["model"] == ["3", "144", "bytes", "0"]  # a tied name and a tensor of complex128
    assert rows["step"][-1] == "1"
    assert "--all" in lines[-1]
    code, result = run_json(capsys, "show", shown, "10")
    assert (code, result["step"], result["world_size"], result["names"]) == (0, 10, 1, ["best"])
    assert result["packages"]["lazysnap"] == "0.1.0"
    assert {part["part"]: part for part in result["parts"]}["base"] == {
        "part": "base",
        "tensors": 1,
        "bytes": 1000,
        "values": 0,
    }
    assert not {"tensors", "state"} & result.keys()


def test_json_has_every_tensor_and_the_state_if_all_is_wanted(shown, capsys):
    result = run_json(capsys, "show", shown, "10", "--all")[1]
    rows = {row["name"]: row for row in result["tensors"]}
    facts = {"dtype": "BF16", "shape": [500], "bytes": 1000, "alias_of": None, "rank": 0}
    assert rows["base.w"] == {"name": "base.w", **facts}
    assert rows["model.tied"]["alias_of"] == "model.w"
    assert rows["model.tied"]["shape"] == [3, 4]
    assert (rows["model.z"]["dtype"], rows["model.z"]["shape"]) == ("complex128", [2, 3])
    assert result["state"]["model"]["w"] == {"$": "tensor", "v": "model.w"}


def test_people_see_tensors_and_values_that_end_where_the_line_does(shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run("show", shown, "latest", "--all") == 0
    out = capsys.readouterr().out
    assert "BF16" in out
    (tied,) = [line.split() for line in out.splitlines() if "model.tied" in line and "F32" in line]
    assert "model.w" in tied
    assert "tensor model.w" in out
    assert "small.pair" in out
    assert "[0, 1, 2," in out
    assert "x" * 100 not in out
    assert ", 599" not in out
    assert "also one" in out


def test_step_name_and_latest_mean_what_they_say(url, capsys):
    for step in (10, 20, 30):
        put(url, step, names=("best",) if step == 20 else ())
    steps = {wanted: run_json(capsys, "show", url, wanted)[1]["step"] for wanted in ("10", "best", "latest")}
    assert steps == {"10": 10, "best": 20, "latest": 30}


def test_latest_is_of_the_newest_run_and_another_can_be_chosen(url, capsys):
    put(url, 30)
    put(url, 10, run_id=OTHER)
    assert run_json(capsys, "show", url, "latest")[1]["run_id"] == OTHER
    assert run_json(capsys, "show", url, "latest", "--run", "0123")[1]["step"] == 30


@pytest.mark.parametrize("wanted", ["7", "no-such-name"])
def test_what_is_not_there_is_exit_code_2_and_says_what_is(shown, capsys, wanted):
    code, result = run_json(capsys, "show", shown, wanted)
    assert code == 2
    assert "there are the steps 10" in result["error"]


def test_a_damaged_snapshot_is_exit_code_1(url, capsys):
    put(url, 10)
    change(url, f"{at(10)}/{SHARD}", flip(0.0001))
    code, result = run_json(capsys, "show", url, "10")
    assert code == 1
    assert "block 0" in result["error"]


def test_names_of_others_are_neither_markup_nor_commands_to_the_terminal(url, capsys):
    evil = "[bold red]\x1b[2J\x07[/]\n"
    put(url, 10, {"model": {evil: torch.ones(2)}, evil: evil + "\ud800", "list": [evil]})
    assert run("show", url, "10", "--all") == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "\x07" not in out
    assert "[bold red]" in out
    assert "\\x1b[2J" in out


def test_all_ranks_are_shown(url, capsys):
    put(url, 10, rank=(0, 2))
    put(url, 10, rank=(1, 2))
    result = run_json(capsys, "show", url, "10", "--all")[1]
    assert [row["rank"] for row in result["tensors"]] == [0, 1]
    run("show", url, "10", "--all")
    assert "values of rank 0" in capsys.readouterr().out
