"""Each line that orders a capture is needed: without it a test or the checker of the software device fails."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from device import software_device

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = 600
TESTS_FAILED = 1


@pytest.mark.slow
@pytest.mark.timeout(software_device.BUILD_DEADLINE_S + DEADLINE_S)
def test_no_wait_event_comparison_or_end_word_of_a_capture_can_go(tmp_path):
    try:
        software_device.built()
    except software_device.CannotBuild as error:
        pytest.skip(str(error))
    script = str(pathlib.Path(__file__).with_name("mutations.py"))
    env = {**os.environ, "LAZYSNAP_TEST_DEVICE": "software"}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    words = [sys.executable, "-W", "ignore", script, str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]

    assert results
    for result in results:
        assert result["status"] == TESTS_FAILED, f"{result['file']}: {result['lines']}\n{result['output']}"
