"""Rules of the core, of slots, of files and of peers are left out, one at a time: the quick tier notices each."""

import pathlib

import pytest
from support import mutants

DEADLINE_S = 900


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_quick_tier_notices_each_rule_that_is_left_out(tmp_path):
    # Where a rule is left out, what a test waits for does not come.
    script = str(pathlib.Path(__file__).with_name("left_out.py"))
    mutants.check(script, tmp_path, DEADLINE_S, LAZYSNAP_TEST_TIMEOUT_S="15")
