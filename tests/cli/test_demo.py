"""``lazysnap demo`` is what a new user runs first: it kills a real training and compares it bit for bit."""

import json

import pytest
from support.programs import output_of


@pytest.mark.slow
def test_the_demo_kills_a_training_and_its_keeper_and_passes_in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = output_of("-m", "lazysnap.cli", "demo", "--json")
    result = json.loads(printed.splitlines()[-1])

    assert result["ok"]
    assert [(run["fault"], run["verdict"]) for run in result["runs"]] == [("kill", "PASS"), ("both", "PASS")]
    assert result["compared"]["lines"] == 201
    assert not list(tmp_path.iterdir())
