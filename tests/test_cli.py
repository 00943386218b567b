"""Promises of the command line."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from lazysnap.cli import main
from lazysnap.config import SnapshotConfig
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels.store import open_store
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta


class BytesSource:
    """A shard that is whole already."""

    def __init__(self, image: bytes) -> None:
        self.image = memoryview(bytearray(image))
        self.size_bytes = len(image)

    def wait(self, upto: int) -> None:
        pass

    def view(self, offset: int, length: int) -> memoryview:
        block = self.image[offset : offset + length]
        return memoryview(bytes(block) + bytes(length - len(block)))

    def finish(self) -> None:
        pass


def write_snapshot(url: str, step: int, *, rank: int = 0, world_size: int = 1) -> None:
    layout = Layout.plan([TensorSpec("w", "F32", (1000,))], {})
    image = layout.header + bytes(range(250)) * 16
    meta = CaptureMeta("0123456789abcdef", 1, step, rank, world_size, captured_ns=10**18)
    open_store(url).write(meta, BytesSource(image))


@pytest.fixture
def level(tmp_path):
    url = str(tmp_path / "level")
    for step in (10, 20):
        write_snapshot(url, step)
    return url


def test_ls_lists_complete_half_and_uncommitted_snapshots_as_what_they_are(level, tmp_path, capsys):
    write_snapshot(level, 30, rank=1, world_size=2)
    torn = tmp_path / "level" / "step-00000040"
    torn.mkdir()
    (torn / "rank-00000-of-00001.safetensors").write_bytes(b"\0" * 100)

    assert main(["ls", level, "--json"]) == 0

    found = {s["step"]: s for s in json.loads(capsys.readouterr().out)["snapshots"]}
    assert [(step, found[step]["complete"]) for step in sorted(found)] == [
        (10, True),
        (20, True),
        (30, False),
        (40, False),
    ]
    assert (found[30]["ranks"], found[30]["world_size"]) == (1, 2)
    assert found[40]["run_id"] is None


def test_ls_shows_a_table(level, capsys):
    assert main(["ls", level]) == 0
    out = capsys.readouterr().out
    assert "complete" in out
    assert "step-00000020" in out


def test_ls_of_an_empty_place_says_so(tmp_path, capsys):
    assert main(["ls", str(tmp_path)]) == 0
    assert "no snapshots" in capsys.readouterr().out


def test_verify_of_good_snapshots_succeeds(level, capsys):
    assert main(["verify", level]) == 0
    assert "2 shards good, 0 bad" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rank-00000-of-00001.safetensors", "rank-00000-of-00001.json"])
@pytest.mark.parametrize("where", [0, 0.5, 0.999])
def test_verify_finds_and_names_a_flipped_byte_in_any_file(level, tmp_path, capsys, name, where):
    path = tmp_path / "level" / "step-00000010" / name
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1
    path.write_bytes(data)

    assert main(["verify", level]) == 1

    out = capsys.readouterr().out
    assert f"step-00000010/{name}" in out
    assert "1 shard good, 1 bad" in out


@pytest.mark.parametrize("change", ["cut", "removed"])
def test_verify_finds_and_names_a_shard_that_is_short_or_gone(level, tmp_path, capsys, change):
    path = tmp_path / "level" / "step-00000020" / "rank-00000-of-00001.safetensors"
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()

    assert main(["verify", level]) == 1
    assert re.search("step-00000020.*", capsys.readouterr().out)


def test_verify_of_nothing_is_no_success(tmp_path):
    assert main(["verify", str(tmp_path)]) == 1


def test_an_unknown_protocol_is_one_clear_line_and_exit_code_2(capsys):
    assert main(["ls", "nosuchprotocol://bucket/run"]) == 2
    assert "nosuchprotocol" in capsys.readouterr().err


def test_the_commands_import_no_torch(level):
    code = "import sys; from lazysnap.cli import main; main(['verify', sys.argv[1]]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, level], check=True, timeout=60, stdout=subprocess.DEVNULL)


def listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(address) == 0


def until(condition, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_keeper_run_ahead_is_there_for_its_job_and_goes_with_sigterm(tmp_path):
    address = JobIdentity.from_config(SnapshotConfig(job_id=f"ahead-{tmp_path}")).address
    command = [sys.executable, "-m", "lazysnap.cli", "keeper", "--job-id", f"ahead-{tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as sidecar:
        try:
            assert until(lambda: listens(address))
            sidecar.send_signal(signal.SIGTERM)
            assert sidecar.wait(20) == 0
        finally:
            sidecar.kill()
    assert until(lambda: not listens(address))


def test_a_keeper_for_no_job_is_one_clear_line(capsys, monkeypatch):
    monkeypatch.delenv("LAZYSNAP_JOB_ID", raising=False)
    assert main(["keeper"]) == 2
    assert "job_id" in capsys.readouterr().err
