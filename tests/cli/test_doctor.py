"""``lazysnap doctor`` finds what would hinder a training, and leaves nothing behind."""

import json
import os
import socket
import subprocess
import sys

import pytest
import seaweed
from cli_level import run_json
from support.disks import fill, small_disk


def verdicts(result: dict) -> dict[str, str]:
    return {check["topic"]: check["verdict"] for check in result["checks"]}


def test_a_good_directory_is_good_and_is_gone_afterwards(capsys, tmp_path):
    code, result = run_json(capsys, "doctor", tmp_path / "runs" / "level")

    assert (code, result["ok"]) == (0, True)
    found = verdicts(result)
    assert {found[topic] for topic in ("versions", "memory", "keeper", "level", "rates", "space")} == {"good"}
    assert not list(tmp_path.iterdir())


def test_a_directory_with_snapshots_keeps_them(capsys, tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "notes").write_text("mine")

    assert run_json(capsys, "doctor", tmp_path)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000001"]


def test_a_full_disk_and_a_place_that_no_level_can_have_are_bad(capsys, tmp_path):
    with small_disk(tmp_path / "disk", 64 << 20) as disk:
        fill(disk)
        code, result = run_json(capsys, "doctor", disk)
        assert (code, verdicts(result)["level"]) == (1, "bad")
        assert "No space left" in json.dumps(result)
        assert sorted(os.listdir(disk)) == ["full", "lost+found"]
    for url, reason in (("/proc/level", "No such file"), ("memory://level", "would die with the process")):
        code, result = run_json(capsys, "doctor", url)
        assert (code, verdicts(result)["level"]) == (1, "bad")
        assert reason in json.dumps(result)


def test_a_level_that_hangs_is_bad_and_does_not_keep_the_command(tmp_path):
    program = (
        "import sys; from lazysnap.cli import doctor, main; doctor._TRIAL_S = 0.5; "
        "sys.exit(main(['doctor', *sys.argv[1:]]))"
    )
    # The first write is that of the small object.
    environment = {**os.environ, "LAZYSNAP_FAULT": "level.local.write:2:hang"}
    command = [sys.executable, "-c", program, str(tmp_path / "level"), "--json"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 1
    assert "did not move for 0.5 s" in done.stdout


def test_a_bucket_is_tried_with_the_credentials_that_are_given(s3_server, capsys):
    options = {**s3_server.options()}
    for secret, verdict in ((options["secret"], "good"), ("wrong-secret-here", "bad")):
        words = [f"{key}={json.dumps(value)}" for key, value in {**options, "secret": secret}.items()]
        given = [word for option in words for word in ("--storage-option", option)]
        code, result = run_json(capsys, "doctor", f"s3://{seaweed.BUCKET}/doctor", *given)
        assert (code, verdicts(result)["level"]) == (int(verdict == "bad"), verdict), result
        assert secret not in json.dumps(result)


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.1", "good"), ("no-such-host.invalid", "bad")])
def test_a_peer_answers_or_is_named(capsys, host, verdict):
    with socket.create_server(("127.0.0.1", 0)):
        _, result = run_json(capsys, "doctor", "--peer", host)
    assert verdicts(result)[f"peer {host}"] == verdict
