"""The suite of tests/gpu on the software device: in a process of its own, for the device belongs to the whole process.

Nothing of it says how fast a real device is, or that a vendor's driver keeps its promises. It says that captures order
their copies, whatever the timing is.
"""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from device import software_device

ROOT = pathlib.Path(__file__).parents[2]
SUITE = [*sorted((ROOT / "tests" / "gpu").glob("test_*.py")), *sorted(pathlib.Path(__file__).parent.glob("suite_*.py"))]
DEADLINE_S = 280
pytestmark = pytest.mark.xdist_group("software device")  # one run of the suite has the outcomes of all


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By file of the suite: the results of its tests, each with the text of its failure."""
    try:
        software_device.built()
    except software_device.CannotBuild as error:
        pytest.skip(str(error))
    report = tmp_path_factory.mktemp("software") / "report.xml"
    alone = ("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ROOT, "--noconftest", "-p", "device.checked")
    words = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *alone, f"--junitxml={report}", *SUITE]
    env = {**os.environ, "LAZYSNAP_TEST_DEVICE": "software", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert report.exists(), done.stdout + done.stderr
    found = {path.stem: [] for path in SUITE}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        stem = next(part for part in case.get("classname").split(".") if part in found)
        wrong = [f"{case.get('name')}: {child.text}" for child in case if child.tag != "properties"]
        found[stem].append(wrong)
    return found


@pytest.mark.timeout(software_device.BUILD_DEADLINE_S + DEADLINE_S)
@pytest.mark.parametrize("stem", [path.stem for path in SUITE])
def test_every_test_for_devices_passes_on_the_software_device(outcomes, stem):
    """None may be skipped, and the checker reports no access that no event orders."""
    assert outcomes[stem]
    assert [text for wrong in outcomes[stem] for text in wrong] == []
