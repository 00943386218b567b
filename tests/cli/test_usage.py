"""Promises that all commands share."""

import json
import os
import subprocess
import sys

import fsspec
import pytest
from cli_level import put, run, run_json
from fsspec.implementations.memory import MemoryFileSystem

from lazysnap.cli import main
from lazysnap.cli.stores import parse_option

COMMANDS = (
    "ls",
    "verify",
    "show",
    "prune",
    "copy",
    "export",
    "stop",
    "status",
    "advise",
    "report",
)


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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(command, "--help")
    assert exit_.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["nix"], ["ls"], ["show", "x"], ["ls", "x", "--storage-option", "nokey"]], ids=str
)
def test_bad_usage_is_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(*words)
    assert exit_.value.code == 2
    assert capsys.readouterr().out == ""


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
    assert run("copy", source, target, "--storage-option", "key=open-sesame") == 0
    assert run("copy", source, target, "--from-option", "key=open-sesame", "--to-option", "key=wrong") == 2
    assert run("copy", source, target, "--from-option", "key=open-sesame", "--to-option", "key=open-sesame") == 0


@pytest.mark.parametrize(
    "words", [["ls"], ["verify"], ["show", "latest"], ["prune", "--yes"], ["copy", "/tmp/nowhere"]], ids=str
)
def test_values_of_options_are_never_shown(words, capsys):
    options = ["key=s3cr3t-k3y", "region=eu-hidden-1", 'client={"token": "t0k3n-value", "pins": [123456]}']
    words = [words[0], "picky://place/run", *words[1:]]
    for option in options:
        words += ["--storage-option", option]
    for extra in ([], ["--json"]):
        assert run(*words, *extra) == 2
        captured = capsys.readouterr()
        for secret in ("s3cr3t-k3y", "eu-hidden-1", "t0k3n-value", "123456"):
            assert secret not in captured.out + captured.err
        assert "***" in captured.err


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
    assert "training goes on" not in said
