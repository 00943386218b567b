"""What nodes hold for each other and say of it, in simulated trainings with faults."""

from collections import Counter

import pytest
from support.protection_simulation import SCENARIOS, play


@pytest.mark.sampled
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
