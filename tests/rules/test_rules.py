"""Rules of the core, of slots, of files and of peers are left out, one at a time: the quick tier notices each."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = 900
TESTS_FAILED = 1


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_quick_tier_notices_each_rule_that_is_left_out(tmp_path):
    script = pathlib.Path(__file__).with_name("left_out.py")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, script, tmp_path], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]

    unnoticed = [result for result in results if result["status"] != TESTS_FAILED]
    assert not unnoticed, "\n\n".join(
        f"{result['rule']}: exit status {result['status']}\n{result['output']}" for result in unnoticed
    )
    assert len(results) >= 60
