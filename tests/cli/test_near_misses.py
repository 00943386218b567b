"""``lazysnap ls`` beside a level says where the level is."""

import pytest
from cli_level import at, put, run, run_json


def test_on_the_parent_of_levels_it_names_them(make_url, capsys):
    for kind in ("local", "memory"):
        parent = make_url(kind)
        put(f"{parent}/first", 1)
        put(f"{parent}/second", 2)
        put(f"{parent}/deep/er", 3)
        levels = [f"{parent}/first", f"{parent}/second"]

        code, found = run_json(capsys, "ls", parent)
        assert (code, found["snapshots"]) == (0, [])
        assert [url.rpartition("/")[2] for url in found["levels_near"]] == ["first", "second"]
        for url in found["levels_near"]:
            assert len(run_json(capsys, "ls", url)[1]["snapshots"]) == 1

        assert run("ls", parent) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"no snapshots in {parent}; there are levels below: {', '.join(levels)}" in said


def test_on_the_directory_of_a_snapshot_it_names_the_level(make_url, capsys):
    level = make_url("local")
    put(level, 1)
    assert run("ls", f"{level}/{at(1)}") == 0
    assert f"this is a part of the level: {level}" in " ".join(capsys.readouterr().out.split())
    assert run_json(capsys, "ls", level)[1]["levels_near"] == []


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_where_nothing_is_near_it_invents_nothing(kind, make_url, tmp_path, capsys):
    url = make_url(kind)
    (tmp_path / "notes").write_text("a file")
    put(f"{url}/a/b/level", 1)
    code, found = run_json(capsys, "ls", url if kind == "memory" else tmp_path)
    assert (code, found["levels_near"]) == (0, [])
