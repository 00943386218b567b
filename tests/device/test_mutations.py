"""Each line that orders a capture is needed: without it a test or the checker of the software device fails."""

import pathlib

import pytest
from device import software_device
from support import mutants

DEADLINE_S = 600


@pytest.mark.slow
@pytest.mark.timeout(software_device.BUILD_DEADLINE_S + DEADLINE_S)
def test_no_wait_event_comparison_or_end_word_of_a_capture_can_go(tmp_path):
    try:
        software_device.built()
    except software_device.CannotBuild as error:
        pytest.skip(str(error))
    environment = {"LAZYSNAP_TEST_DEVICE": "software", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    script = str(pathlib.Path(__file__).with_name("mutations.py"))
    mutants.check(script, tmp_path, DEADLINE_S, **environment)
