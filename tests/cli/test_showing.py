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


def test_json_has_the_facts_every_tensor_and_the_state(shown, capsys):
    code, result = run_json(capsys, "show", shown, "10")
    assert code == 0
    assert (result["step"], result["world_size"], result["names"]) == (10, 1, ["best"])
    assert result["packages"]["lazysnap"] == "0.1.0"
    rows = {row["name"]: row for row in result["tensors"]}
    facts = {"dtype": "BF16", "shape": [500], "bytes": 1000, "alias_of": None, "rank": 0}
    assert rows["base.w"] == {"name": "base.w", **facts}
    assert rows["model.tied"]["alias_of"] == "model.w"
    assert rows["model.tied"]["shape"] == [3, 4]
    assert (rows["model.z"]["dtype"], rows["model.z"]["shape"]) == ("complex128", [2, 3])
    assert result["state"]["model"]["w"] == {"$": "tensor", "v": "model.w"}


def test_people_see_tensors_and_values_with_long_ones_shortened(shown, capsys):
    assert run("show", shown, "latest") == 0
    out = capsys.readouterr().out
    assert "best" in out
    assert "BF16" in out
    (tied,) = [line.split() for line in out.splitlines() if "model.tied" in line and "F32" in line]
    assert "model.w" in tied
    assert "tensor model.w" in out
    assert "small.pair" in out
    assert "[0, 1, 2," in out
    assert "x" * 100 not in out
    assert ", 599" not in out
    assert "also one" in out


def test_full_shortens_nothing(shown, capsys):
    run("show", shown, "latest", "--state", "--full")
    assert ", 599" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "there", "not_there"), [("--tensors", "tensors", "state"), ("--state", "state", "tensors")]
)
def test_it_can_be_narrowed(shown, capsys, option, there, not_there):
    result = run_json(capsys, "show", shown, "latest", option)[1]
    assert there in result
    assert not_there not in result
    run("show", shown, "latest", option)
    out = capsys.readouterr().out
    assert "committed" not in out
    assert ("small.text" in out) == (there == "state")


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
    assert "complete are the steps 10" in result["error"]


def test_a_damaged_snapshot_is_exit_code_1(url, capsys):
    put(url, 10)
    change(url, f"{at(10)}/{SHARD}", flip(0.0001))
    code, result = run_json(capsys, "show", url, "10")
    assert code == 1
    assert "block 0" in result["error"]


def test_names_of_others_are_neither_markup_nor_commands_to_the_terminal(url, capsys):
    evil = "[bold red]\x1b[2J\x07[/]\n"
    put(url, 10, {"model": {evil: torch.ones(2)}, evil: evil + "\ud800", "list": [evil]})
    assert run("show", url, "10") == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "\x07" not in out
    assert "[bold red]" in out
    assert "\\x1b[2J" in out


def test_all_ranks_are_shown(url, capsys):
    put(url, 10, rank=(0, 2))
    put(url, 10, rank=(1, 2))
    result = run_json(capsys, "show", url, "10")[1]
    assert [row["rank"] for row in result["tensors"]] == [0, 1]
    run("show", url, "10")
    assert "state of rank 0" in capsys.readouterr().out
