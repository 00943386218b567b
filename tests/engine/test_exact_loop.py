"""Killed by SIGKILL in the middle of a step, a plain loop goes on as if nothing had happened.

It dies in every second step: at an end of an epoch and within one. Loaders of other kinds are in tests/data.
"""

from pathlib import Path

import pytest
from looped import CASES
from support.cuts import check_every_cut

SCRIPT = str(Path(__file__).with_name("looped.py"))
STRIDES = {"IterableInWorkers": 4}
"""Each worker has all batches there."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.quick if case == "Accumulated" else ()) for case in CASES]
)
def test_killed_in_steps_of_a_loop_of_any_kind_it_ends_bit_for_bit_as_uninterrupted(zygote, tmp_path, case):
    check_every_cut(zygote, SCRIPT, case, tmp_path, stride=STRIDES.get(case, 2))
