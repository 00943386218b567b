"""Promises that all commands share."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

import fsspec
import pytest
from cli_level import OTHER, RUN, put, run, run_json
from fsspec.implementations.memory import MemoryFileSystem
from msgspec import structs
from run_history import LEVEL, History, Life

from lazysnap.cli import main
from lazysnap.cli.commands import parse_option, parser
from lazysnap.cli.output import Output
from lazysnap.events import LevelFailed, encode
from lazysnap.levels.redaction import Redaction
from lazysnap.shard.names import events_file_name


class PickyFileSystem(MemoryFileSystem):
    """Needs a key, and tells it to everybody."""

    protocol = "picky"
    cachable = False

    def __init__(self, *, key: str, region: str = "", client: dict | None = None) -> None:
        super().__init__()
        self.key, self.region, self.client = key, region, client

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("picky://", "memory://"))

    def ls(self, path, detail=True, **kwargs):
        if self.key != "open-sesame":
            raise PermissionError(f"key {self.key!r} of {self.region!r} is wrong for {self.client}")
        return super().ls(path, detail=detail, **kwargs)


@pytest.fixture(autouse=True)
def _picky():
    fsspec.register_implementation("picky", PickyFileSystem, clobber=True)
    yield
    sys.modules["fsspec.registry"]._registry.pop("picky")


@pytest.mark.parametrize(
    "words", [[], ["nix"], ["ls"], ["show", "x"], ["ls", "x", "--storage-option", "nokey"]], ids=str
)
def test_bad_usage_is_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(*words)
    assert exit_.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_worker_without_a_command_is_one_clear_line(capsys):
    assert run("worker", "--") == 2
    assert "name a command" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "worker"])
def test_a_command_that_ends_as_the_program_has_no_json(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--json", "--", "true"])
    assert end.value.code == 2
    assert "--json" in capsys.readouterr().err


def test_a_misspelt_option_shows_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        run("prune", "x", "--keeplast", "3")
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "usage: lazysnap prune" in said
    assert "unrecognized arguments: --keeplast 3" in said


def test_an_error_of_several_lines_is_shown_as_lines(capsys):
    Output("ls", as_json=False, redaction=Redaction({})).error("the first\nthe second\x1b[2J")
    assert capsys.readouterr().err.splitlines() == ["error: the first", "the second\\x1b[2J"]


def test_an_option_without_an_equals_sign_is_not_repeated_to_the_screen(capsys):
    with pytest.raises(SystemExit):
        run("ls", "x", "--storage-option", "hunter2hunter2")
    assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key=abc", ("key", "abc")),
        ("anon=true", ("anon", True)),
        ("n=3", ("n", 3)),
        ('pin="0042"', ("pin", "0042")),
        ('client_kwargs={"endpoint_url": "http://x"}', ("client_kwargs", {"endpoint_url": "http://x"})),
        ("token=a=b", ("token", "a=b")),
        ("empty=", ("empty", "")),
    ],
)
def test_values_of_options_are_json_if_they_can_be(text, expected):
    assert parse_option(text) == expected


def test_options_reach_the_file_system(make_url, capsys):
    url = make_url("memory")
    put(url, 10)
    picky = url.replace("memory://", "picky://")
    code, result = run_json(capsys, "ls", picky, "--storage-option", "key=open-sesame", "--storage-option", "region=eu")
    assert code == 0
    assert len(result["snapshots"]) == 1


def test_copy_takes_options_for_each_side(make_url, capsys):
    source, target = make_url("memory"), make_url("memory")
    put(source, 10)
    source, target = (url.replace("memory://", "picky://") for url in (source, target))
    key = ("--storage-option", "key=open-sesame")
    assert run("copy", source, target, *key) == 0
    assert run("copy", source, target, *key, "--to-option", "key=wrong") == 2
    assert run("copy", source, target, *key, "--to-option", "key=open-sesame", "--to-option", "region=eu") == 0
    assert run("copy", source, target, "--to-option", "key=open-sesame") == 2


@pytest.mark.parametrize(
    "words", [["ls"], ["verify"], ["show", "latest"], ["prune", "--yes"], ["copy", "/tmp/nowhere"]], ids=str
)
def test_secrets_among_options_are_never_shown(words, capsys):
    options = ["key=s3cr3t-k3y", "region=eu-west", 'client={"token": "t0k3n-value", "passes": [123456]}']
    words = [words[0], "picky://place/run", *words[1:]]
    for option in options:
        words += ["--storage-option", option]
    for extra in ([], ["--json"]):
        assert run(*words, *extra) == 2
        captured = capsys.readouterr()
        for secret in ("s3cr3t-k3y", "t0k3n-value", "123456"):
            assert secret not in captured.out + captured.err
        assert "***" in captured.err
        assert "eu-west" in captured.err


def test_an_option_that_is_no_secret_changes_nothing_that_is_shown(make_url, capsys):
    url = make_url("memory")
    put(url, 1000)
    words = ["ls", url.replace("memory://", "picky://"), "--storage-option", "key=open-sesame"]
    _, without = run_json(capsys, *words)
    _, result = run_json(capsys, *words, "--storage-option", "region=1000")
    assert result == without


def test_options_that_the_file_system_does_not_know_are_one_clear_line(capsys):
    assert run("ls", "picky://place/run", "--storage-option", "no_such_option=hunter2") == 2
    err = capsys.readouterr().err
    assert "no_such_option" in err
    assert "hunter2" not in err


def test_a_password_in_the_url_is_refused_and_not_shown(capsys):
    assert run("ls", "sftp://user:hunter2@host/run", "--json") == 2
    captured = capsys.readouterr()
    assert "the URL sftp://… holds a password" in captured.err + captured.out
    assert "hunter2" not in captured.out + captured.err


@pytest.mark.slow
def test_in_a_pipe_bars_and_colours_leave_no_trace_and_a_closed_one_is_no_crash(make_url):
    url = make_url("local")
    for step in range(1, 40):
        put(url, step)
    words = [sys.executable, "-m", "lazysnap.cli", "verify", url, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    assert "\x1b" not in done.stdout
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(words[:-1], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert closed.returncode == 2
    assert "Traceback" not in closed.stderr


@pytest.mark.parametrize("words", [["ls"], ["ls", "x", "--storage-option", "y"], ["nothing"], []])
def test_bad_usage_is_said_in_json_too(words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert end.value.code == 2
    assert said["ok"] is False
    assert said["error"].startswith("usage: ")
    assert said["command"] == (words[0] if words and words[0] == "ls" else None)


def test_who_only_looks_is_told_of_no_training(capsys):
    assert main(["ls", "http://127.0.0.1:9/x"]) == 2
    said = capsys.readouterr().err
    assert "127.0.0.1" in said
    assert "training continues" not in said


# ---------------------------------------------------------------- the surface

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "cli.md"


def subcommands():
    [action] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return action.choices


def test_the_surface_does_not_grow():
    """A command or an option enters only together with one that leaves."""
    options = {"--version"}
    for command in subcommands().values():
        for action in command._actions:
            options.update(option for option in action.option_strings if option.startswith("--"))
    assert " ".join(sorted(subcommands())) == (
        "advise chaos copy demo doctor export ls prune report run show status stop verify worker"
    )
    assert " ".join(sorted(options)) == (
        "--all --bytes-per-param --config --deadline --faults --force --format --help --html --json "
        "--keep-every --keep-last --max-restarts --may-lose --mtbf --name --nodes "
        "--only --params --peer --persist --prometheus --ranks --result --run --seed "
        "--sharding --step --step-time --storage-option --timeout --to --to-option --version --yes"
    )


@pytest.mark.parametrize("command", subcommands())
def test_help_fits_a_screen_and_has_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run(command, "--help")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("Example: ") for line in lines)


def documented_keys():
    """Return the keys in the tables of the page, by command."""
    keys = {}
    command = ""
    for line in PAGE.read_text().split("\n## JSON\n")[1].splitlines():
        cells = re.fullmatch(r"\| (`(\w+)`|its `(\w+)`) \| (.*) \|", line)
        if cells:
            command = cells[2] or command
            keys.setdefault(command, set()).update(re.findall(r"`(\w+)`", cells[4]), filter(None, [cells[3]]))
    return keys


def printed_keys(value, data=("packages", "durable", "state")):
    """Return the keys of a result, but those of what a snapshot or a place is called."""
    if isinstance(value, list):
        return {key for item in value for key in printed_keys(item)}
    if not isinstance(value, dict):
        return set()
    keys = set()
    for key, item in value.items():
        if re.fullmatch(r"\w+", key) and key not in ("memory",):
            keys.add(key)
        if key not in data or isinstance(item, list):
            keys |= printed_keys(item)
    return keys - {"command", "ok", "error"}


def test_the_page_documents_the_keys_that_are_printed(make_url, tmp_path, capsys):
    url, other = make_url("local"), make_url("local")
    put(url, 10, names=("best",))
    put(url, 20)
    history = History([Life(20, wait_s=0.5, back=5), Life(10, how="goodbye")])
    events = [*history.events, LevelFailed(t=history.now, level=LEVEL, step=7, text="full")]
    (pathlib.Path(url) / events_file_name(RUN, 0)).write_bytes(b"".join(map(encode, events)))
    lines = {
        "ls": [url],
        "show": [url, "latest", "--all"],
        "verify": [url],
        "copy": [url, other],
        "export": [url, "latest", "--to", tmp_path / "w.safetensors"],
        "prune": [url, "--keep-last", "1"],
        "advise": [url, "--params", "7b"],
        "doctor": [tmp_path / "level"],
        "report": [url],
    }
    documented = documented_keys()
    assert set(documented) == {*lines, "status", "stop"}, "those of a keeper: tests/keeper"
    for command, words in lines.items():
        code, result = run_json(capsys, command, *words)
        assert code == 0, result
        extra = {"good", "warn", "bad"} if command == "doctor" else set()
        assert printed_keys(result) == documented[command] - extra, command


@pytest.mark.parametrize("command", ["ls", "verify", "show", "show --all", "prune", "copy", "report", "advise"])
def test_what_a_command_prints_fits_80_columns(make_url, capsys, monkeypatch, command):
    """Also where paths are long: a table has one line for each row."""
    monkeypatch.setenv("COLUMNS", "80")
    url, other = make_url("local"), make_url("local")
    long = "/long/place" * 8
    for step in (10, 20):
        put(url, step, names=("before-the-learning-rate-went-down",) if step == 10 else ())
        put(url, step, run_id=OTHER)
    history = History([Life(20, wait_s=0.5, back=5), Life(10, how="goodbye")])
    events = [structs.replace(event, level=long) if hasattr(event, "level") else event for event in history.events]
    (pathlib.Path(url) / events_file_name(RUN, 0)).write_bytes(b"".join(map(encode, events)))
    name, *more = command.split()
    words = {"show": ["latest"], "copy": [other], "prune": ["--keep-last", "1", "--yes"]}.get(name, [])

    assert run(name, url, *words, *more) == 0

    lines = [line for line in capsys.readouterr().out.splitlines() if url not in line]  # a path alone may be long
    assert max(map(len, lines)) <= 80
    cut = [line for line in lines if "…" in line]
    assert all("long/place " in line for line in cut), cut  # the end of a path says more than its beginning
    if "--all" not in more:
        assert len(lines) <= 24


def test_what_is_not_foreseen_is_called_a_bug(monkeypatch, capsys):
    monkeypatch.setattr("lazysnap.cli.inspecting.open_existing", lambda *_: 1 / 0)
    assert run("ls", "x") == 2
    assert capsys.readouterr().err == (
        "error: this is a bug in lazysnap; please report it: ZeroDivisionError: division by zero\n"
    )
