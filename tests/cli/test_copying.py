"""Promises of ``lazysnap copy``."""

import os
import signal
import subprocess
import sys
from typing import ClassVar

import fsspec
import pytest
import torch
from cli_level import (
    MANIFEST,
    OTHER,
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
from fsspec.implementations.memory import MemoryFileSystem
from support.stored import steps_at


def content(url: str, path: str) -> bytes:
    filesystem, root = fsspec.core.url_to_fs(url)
    return filesystem.cat_file(f"{root}/{path}")


@pytest.fixture(params=["local-memory", "memory-local"])
def places(request, make_url):
    return [make_url(kind) for kind in request.param.split("-")]


def test_everything_arrives_byte_for_byte_with_names(places, capsys):
    source, target = places
    put(source, 10, names=("best",))
    put(source, 20)
    put(source, 30, run_id=OTHER)

    code, result = run_json(capsys, "copy", source, target)

    assert (code, result["ok"]) == (0, True)
    assert files(target) == files(source)
    for path in files(source):
        if path.endswith(".safetensors"):
            assert content(target, path) == content(source, path), path
    assert [item["state"] for item in result["snapshots"]] == ["copied"] * 3
    assert result["snapshots"][0]["run_id"] == OTHER
    assert result["size_bytes"] == 3 * (4096 + 4000)
    assert run("verify", target) == 0


def test_a_second_time_everything_is_there_already(places, capsys):
    source, target = places
    put(source, 10)
    put(source, 20)
    assert run("copy", source, target) == 0
    before = {path: content(target, path) for path in files(target)}
    code, result = run_json(capsys, "copy", source, target)
    assert code == 0
    assert [item["state"] for item in result["snapshots"]] == ["there already"] * 2
    assert result["size_bytes"] == 0
    assert {path: content(target, path) for path in files(target)} == before


@pytest.mark.parametrize("what", ["shard", "manifest"])
def test_what_is_there_but_damaged_is_copied_again(make_url, what):
    source, target = make_url("local"), make_url("local")
    put(source, 10)
    assert run("copy", source, target) == 0
    change(target, f"{at(10)}/{MANIFEST if what == 'manifest' else SHARD}", flip(0.99))
    assert run("copy", source, target) == 0
    assert run("verify", target) == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "latest"], [30]),
        (["--step", "10"], [10]),
        (["--step", "best", "--step", "30"], [20, 30]),
        (["--step", "10", "--step", "first"], [10]),
        ([], [10, 20, 30]),
    ],
    ids=str,
)
def test_some_can_be_chosen(make_url, words, expected):
    source, target = make_url("local"), make_url("memory")
    put(source, 10, names=("first",))
    put(source, 20, names=("best",))
    put(source, 30)
    assert run("copy", source, target, *words) == 0
    assert steps_at(target) == expected


def test_a_damaged_snapshot_is_named_and_left_out_and_the_others_are_copied(places, capsys):
    source, target = places
    for step in (10, 20, 30):
        put(source, step)
    change(source, f"{at(20)}/{SHARD}", flip(0.99))
    code, result = run_json(capsys, "copy", source, target)
    assert code == 1
    assert {item["step"]: item["state"] for item in result["snapshots"]} == {10: "copied", 20: "bad", 30: "copied"}
    assert at(20) in result["problems"][0]
    assert not [path for path in files(target) if path.startswith(at(20))]
    assert run("verify", target) == 0


def test_what_cannot_be_copied_is_exit_code_2(make_url, capsys):
    source, target = make_url("local"), make_url("memory")
    assert run("copy", source, target) == 2
    put(source, 10)
    assert run("copy", source, source) == 2
    os.symlink(source, f"{source}-link")
    assert run("copy", source, f"{source}-link") == 2
    assert run("copy", source, target, "--step", "7") == 2
    assert run("copy", source, "nosuchprotocol://x/y") == 2
    assert files(target) == []


def test_a_full_target_is_exit_code_2_and_nothing_half_is_left(make_url):
    source, target = make_url("local"), make_url("local")
    put(source, 10)
    environment = {**os.environ, "LAZYSNAP_FAULT": "level.local.write:1:enospc"}
    command = [sys.executable, "-m", "lazysnap.cli", "copy", source, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "free space there" in done.stderr
    assert files(target) == []


class Damages(MemoryFileSystem):
    """Flips a bit of each file that it stores."""

    protocol = "damages"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    def mv(self, path1, path2, **options):
        super().mv(path1, path2, **options)
        if path2.endswith(".safetensors"):
            data = bytearray(self.cat_file(path2))
            data[-1] ^= 1
            self.pipe_file(path2, bytes(data))


def test_a_copy_that_reads_back_other_bytes_is_not_left_as_a_snapshot(make_url, capsys):
    fsspec.register_implementation("damages", Damages, clobber=True)
    source = make_url("local")
    put(source, 10)

    assert run("copy", source, "damages://place/run") == 2

    assert "reads back other bytes" in capsys.readouterr().err
    assert files("damages://place/run") == []


@pytest.mark.slow
@pytest.mark.parametrize("point", ["level.local.created", "level.local.write", "level.store.publish_shard"])
def test_ctrl_c_leaves_nothing_half_visible_and_the_next_copy_goes_on(make_url, point):
    source, target = make_url("local"), make_url("local")
    put(source, 10, {"model": {"w": torch.arange(9_000_000.0)}})
    put(source, 20)
    environment = {**os.environ, "LAZYSNAP_FAULT": f"{point}:1:stop"}
    command = [sys.executable, "-m", "lazysnap.cli", "copy", source, target, "--step", "10", "--step", "20", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "it ended before it came there"
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, out
    assert b'"ok": false' in out
    assert files(target) == []
    assert run("copy", source, target) == 0
    assert run("verify", target) == 0
    assert len(files(target)) == 4


@pytest.mark.slow
def test_what_a_killed_copy_left_goes_with_the_next_one(make_url):
    source, target = make_url("local"), make_url("local")
    put(source, 10)
    environment = {**os.environ, "LAZYSNAP_FAULT": "level.local.rename:1:kill"}
    command = [sys.executable, "-m", "lazysnap.cli", "copy", source, target]
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == -signal.SIGKILL
    assert len(files(target)) == 1
    assert run("copy", source, target) == 0
    assert files(target) == files(source)


def test_a_manifest_that_is_gone_meanwhile_is_a_problem_of_that_snapshot_alone(make_url, capsys):
    source, target = make_url("local"), make_url("local")
    put(source, 10)
    put(source, 20)
    remove(source, f"{at(10)}/{SHARD}")
    code, result = run_json(capsys, "copy", source, target)
    assert code == 1
    assert [item["step"] for item in result["snapshots"]] == [20]
