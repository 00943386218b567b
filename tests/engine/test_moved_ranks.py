"""A restart with its ranks on other nodes: what the slots of other ranks say of the check of a restart."""

from types import SimpleNamespace

import pytest

from lazysnap.keeper.memory_inventory import MemoryEntry, MemoryInventory
from lazysnap.resolver import candidates
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.restart import _is_settled
from lazysnap.topology import places

RUN = "ab" * 8


def inventory_of(place, captured_by, *, is_repeatable):
    """The memory of a node, as a rank there lists it, with one capture of rank ``captured_by``."""
    capture = MemoryEntry(7, RUN, RUN, 1, captured_by, 2, None, None, is_repeatable)
    held = MemoryInventory((capture,), local_ranks=(0,))
    client = SimpleNamespace(connect=lambda timeout_s: None, memory=lambda timeout_s: held)
    [inventory] = NodeMemory(client, None, place, 1, pytest.fail).inventories()
    return inventory


@pytest.mark.parametrize("is_repeatable", [True, False])
@pytest.mark.parametrize("are_moved", [True, False])
def test_a_run_is_settled_only_by_the_slots_of_the_ranks_themselves(are_moved, is_repeatable):
    inventories = []
    for place in places(["a", "b"]):
        captured_by = 1 - place.rank if are_moved else place.rank
        inventories.append(inventory_of(place, captured_by, is_repeatable=is_repeatable))
    [newest] = candidates(inventories)

    assert _is_settled(newest) is (not are_moved and not is_repeatable)
