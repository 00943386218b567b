"""The commands on a real S3 server."""

import json
import os
import pathlib
import signal
import tempfile

import pytest
import safetensors.torch
import seaweed
import torch
from cli_level import put, run, run_json
from support.waiting import until

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine, events

pytestmark = pytest.mark.slow  # a real server
URL = f"s3://{seaweed.BUCKET}/cli/run"


def options(server: seaweed.Seaweed, name: str = "--storage-option") -> list[str]:
    return [word for key, value in server.options().items() for word in (name, f"{key}={json.dumps(value)}")]


def test_snapshots_go_to_s3_are_checked_exported_and_pruned_there_and_come_back(s3_server, make_url, tmp_path, capsys):
    source, back = make_url("local"), make_url("local")
    base = torch.rand(500)
    for step in (10, 20, 30):
        state = {"model": {"base": base, "w": torch.full((5_000_000,), float(step))}}
        put(source, step, state, names=("best",) if step == 10 else ())
    s3 = options(s3_server)

    code, result = run_json(capsys, "copy", source, URL, *s3)
    assert code == 0, result
    assert [item["state"] for item in result["snapshots"]] == ["copied"] * 3
    code, result = run_json(capsys, "copy", source, URL, "--step", "latest", *options(s3_server, "--to-option"))
    assert (code, result["snapshots"][0]["state"]) == (0, "there already")

    listed = run_json(capsys, "ls", URL, *s3)[1]
    assert [(item["step"], item["complete"], item["names"]) for item in listed["snapshots"]] == [
        (10, True, ["best"]),
        (20, True, []),
        (30, True, []),
    ]
    assert run_json(capsys, "verify", URL, *s3)[1]["ok"] is True
    assert run_json(capsys, "show", URL, "best", *s3)[1]["step"] == 10

    assert run("export", URL, "latest", "--to", tmp_path / "w.safetensors", *s3) == 0
    loaded = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert torch.equal(loaded["base"], base)
    assert set(loaded["w"].tolist()) == {30.0}

    code, result = run_json(capsys, "prune", URL, "--keep-last", "1", "--yes", *s3)
    assert code == 0
    assert [item["step"] for item in result["snapshots"]] == [20]
    assert run("copy", URL, back, *s3, "--to-option", "use_listings_cache=false") == 0
    assert run_json(capsys, "verify", back)[1]["ok"] is True
    assert [item["step"] for item in run_json(capsys, "ls", back)[1]["snapshots"]] == [10, 30]


@pytest.fixture
def runtime(monkeypatch):
    """A runtime directory of its own."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp") as directory:
        monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", directory)
        yield pathlib.Path(directory)


def test_the_report_of_a_run_whose_keeper_was_killed_is_whole_at_a_url(s3_server, s3_url, runtime, capsys):
    """The next keeper goes on with the file in the runtime directory, and copies it at its end."""
    level = PersistentLevel(s3_url, every_n_steps=1, storage_options=s3_server.options())
    engine = SnapshotEngine(SnapshotConfig(levels=(level,)), {"model": torch.nn.Linear(10, 10)})
    with engine:
        assert engine.boundary(1)
        engine.gate()
        assert engine.wait(1, until="durable", timeout_s=60)
        [here] = until(lambda: list(runtime.glob("events-*.jsonl")))
        until(lambda: b'"event":"complete"' in here.read_bytes())
        keeper = engine._client.keeper_pid
        os.kill(keeper, signal.SIGKILL)
        until(lambda: engine._client.keeper_pid not in (None, keeper))
        until(lambda: engine.boundary(engine.step + 1))
        assert engine.wait(until="durable", timeout_s=60)
        last = engine.step

    s3 = options(s3_server)
    until(lambda: not here.exists(), timeout_s=60)
    code, found = run_json(capsys, "report", s3_url, *s3)
    assert (code, found["step"], found["how"], found["interruptions"]) == (0, last, "goodbye", [])
    [file] = events.read(s3_url, s3_server.options())
    assert sum(isinstance(event, events.KeeperStarted) for event in file.events) == 2


@pytest.mark.parametrize("url", ["s3://no-such-bucket/run", URL], ids=["bucket", "key"])
def test_what_is_wrong_is_one_line_without_secrets(s3_server, capsys, url):
    words = options(s3_server)
    if url == URL:
        words += ["--storage-option", "secret=wrong-secret-here"]
    assert run("verify", url, *words) in (1, 2)
    captured = capsys.readouterr()
    for secret in ("wrong-secret-here", s3_server.options()["secret"], s3_server.options()["key"]):
        assert secret not in captured.out + captured.err
    assert "Traceback" not in captured.err
