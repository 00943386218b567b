"""Without a link between keepers nothing is stored: the trainers of both sides hear of it, again, and of its end."""

import pytest
from support.node_rig import Rig
from support.waiting import until

from lazysnap.config import PersistentLevel
from lazysnap.events import Alert
from lazysnap.keeper import node_links, reminder


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(node_links, "_UNREACHED_S", 0.3)
    monkeypatch.setattr(reminder, "_AGAIN_S", 0.3)
    rig = Rig(PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=2), nodes=2)
    rig.begin()
    yield rig
    rig.close()


def unlinked(rig, node):
    return [event.text for event in list(rig.told_to[node]) if isinstance(event, Alert) and event.about == "links"]


@pytest.mark.slow
@pytest.mark.parametrize(("away", "left", "said"), [(1, 0, "the keeper of node 1"), (0, 1, "of rank 0's node")])
def test_trainers_hear_again_and_again_that_a_node_is_not_reached_and_that_it_is_back(two_nodes, away, left, said):
    rig = two_nodes
    assert rig.store() == 2
    before = len(unlinked(rig, left))

    rig.stop(away)

    assert until(lambda: len(unlinked(rig, left)) >= before + 3)
    texts = unlinked(rig, left)[before:]
    assert all(said in text and "MASTER_ADDR" in text for text in texts), texts
    rig.replace(away)
    assert until(lambda: unlinked(rig, left)[-1] == "")
    rig.store()


@pytest.mark.slow
def test_a_keeper_that_replaces_another_one_says_that_the_trouble_is_over(two_nodes, monkeypatch):
    rig = two_nodes
    rig.store()
    rig.stop(1)
    assert until(lambda: unlinked(rig, 0))
    monkeypatch.setattr(node_links, "_UNREACHED_S", 3600.0)

    rig.replace(0)
    rig.replace(1)

    assert until(lambda: unlinked(rig, 0)) == [""]
    rig.store()
