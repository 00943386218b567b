"""Killed by SIGKILL in the middle of every step, a plain loop goes on as if nothing had happened.

With loaders and samplers of other kinds it dies in every second step: at an end of an epoch and within one.
"""

from pathlib import Path

import pytest
from looped import CASES
from support.cuts import check_every_cut

SCRIPT = str(Path(__file__).with_name("looped.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.quick if case == "Accumulated" else ()) for case in CASES]
)
def test_killed_in_every_step_of_a_loop_it_ends_bit_for_bit_as_uninterrupted(zygote, tmp_path, case):
    check_every_cut(zygote, SCRIPT, case, tmp_path, stride=1 if case == "Shuffled" else 2)
