"""``lazysnap demo`` is what a new user runs first: it kills a real training and compares it bit for bit."""

import json

import pytest
from support.programs import output_of


@pytest.mark.slow
def test_the_demo_kills_a_training_and_its_keeper_and_passes_in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = output_of("-m", "lazysnap.cli", "demo", "--max-steps", "16", "--kills", "2", "--json")
    result = json.loads(printed.splitlines()[-1])

    assert result["ok"]
    assert result["digests"]["undisturbed"] == result["digests"]["killed"]
    assert [kill["killed"] for kill in result["kills"]] == ["training", "training and keeper"]
    assert [kill["from"] for kill in result["kills"]] == ["memory", "disk"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_more_kills_than_the_steps_have_room_for_are_refused(tmp_path):
    printed = output_of("-m", "lazysnap.cli", "demo", "--max-steps", "60", "--kills", "30", code=2)
    assert "--kills must be from 1 to 7" in printed
