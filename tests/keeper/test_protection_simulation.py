"""What nodes hold for each other and say of it, in simulated trainings with faults."""

from collections import Counter

import pytest
from support.protection_simulation import SCENARIOS, play


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_fault_breaks_what_is_promised_of_protection(scenario, block):
    """What is said to be protected can be computed, no trainer waits for held slots, and grants go on after faults."""
    broken, seen = Counter(), Counter()
    for seed in range(5 * block, 5 * block + 5):
        cluster = play(scenario, seed)
        broken.update({f"{promise}, seed {seed}": times for promise, times in cluster.broken.items() if times})
        seen.update(cluster.seen)

    assert broken == {}
    assert seen["protected"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [109, 140, 163])
def test_a_protected_step_of_which_not_all_nodes_know_outlasts_the_coordinator(seed):
    """The keeper that knew is dead, and with it one part of the parity: no other node lets its part go."""
    assert not +play("coordinator", seed).broken
