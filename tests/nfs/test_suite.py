"""The suites of storages, run by pytest in the guest, over the NFS mount."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SUITE = pathlib.Path(__file__).with_name("suite_in_guest.py")
DEADLINE_S = 1200  # two minutes on an idle machine; ten times that on a busy one are no fault
# Objects of several blocks, which take seconds each here, are in test_nfs.py.
CONTRACT = "(TestStorage or TestStore) and not 1677 and not 3355"
EVERY = int(os.environ.get("LAZYSNAP_TEST_EVERY", "50"))
pytestmark = pytest.mark.xdist_group("nfs")  # one server and one client are enough for all
OPTIONS = "-q -W error -c /dev/null --noconftest -p no:cacheprovider"
LACKING = 4
"""Tests of the contract skip themselves where a place lacks what they are about: stamps, or a client without rights."""


def collected(chosen):
    """How many tests of the suites are chosen."""
    words = [sys.executable, "-m", "pytest", *OPTIONS.split(), "--rootdir=/tmp", "--collect-only", str(SUITE)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "LAZYSNAP_TEST_EVERY": str(EVERY)}
    done = subprocess.run([*words, "-k", chosen], capture_output=True, text=True, env=env, check=True)
    (count,) = re.findall(r"^(\d+)/\d+ tests collected ", done.stdout, re.MULTILINE)
    return int(count)


@pytest.fixture
def skipped(lab, place):
    """Runs some of the suites: all that were chosen pass, or skip themselves; how many did that."""

    def run(chosen, deadline_s=DEADLINE_S):
        command = (
            f"cd /run && PYTHONPATH={ROOT}:{ROOT}/tests LAZYSNAP_TEST_DIRECTORY={place.hard}"
            f" LAZYSNAP_TEST_EVERY={EVERY} {sys.executable} -m pytest {OPTIONS}"
            f" --rootdir=/run --basetemp=/run/tmp {SUITE} -k '{chosen}'"
        )
        # A server that crashes is started again, as on any machine that serves files: ganesha does, under thousands of
        # refused operations. The mount is a hard one.
        output = lab.guest.start("sh", command).result_of_any_length(lab.server.ensure, deadline_s)
        [(passed, skipped)] = re.findall(r"^(\d+) passed, (?:(\d+) skipped, )?.*deselected in ", output, re.MULTILINE)
        assert int(passed) + int(skipped or 0) == collected(chosen)
        assert list(place.host.iterdir()) == []
        return int(skipped or 0)

    return run


@pytest.mark.timeout(DEADLINE_S + 60)
def test_nfs_keeps_the_contract_of_a_storage(skipped):
    assert skipped(CONTRACT) <= LACKING


@pytest.mark.timeout(DEADLINE_S + 3 * DEADLINE_S // EVERY + 60)
def test_snapshots_on_nfs_outlast_a_failure_of_its_operations(skipped):
    """``LAZYSNAP_TEST_EVERY=1`` breaks every one of them."""
    assert skipped("TestBreakage", DEADLINE_S + 3 * DEADLINE_S // EVERY) == 0
