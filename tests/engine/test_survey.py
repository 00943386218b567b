"""Which ranks look at one place together: those that see the same directories, and no others."""

import pytest
from support.names import directory_of

from lazysnap.errors import ConfigError
from lazysnap.resolver import Inventory
from lazysnap.restore.survey import check_levels, merged, sites_of
from lazysnap.topology import places

NODES = places(["a", "a", "b", "b"])
URL, PATH = "s3://bucket/run", "/scratch/run"


def listing(mark):
    directory = {"name": directory_of(1), "ranges": [[4, 0, 3]], "names": [], "bare": "", "mark": mark}
    return {"directories": [directory], "problems": []}


def sites(url, first, second):
    found = sites_of([[[url, first]], [], [[url, second]] if second else [], []], NODES)
    return [(site.members, site.label is None) for site in found]


def test_a_path_that_all_nodes_see_alike_is_one_place():
    assert sites(PATH, listing([1, 2]), listing([1, 2])) == [((0, 1, 2, 3), True)]


def test_disks_of_different_nodes_are_different_places():
    assert sites(PATH, listing([1, 2]), listing([1, 3])) == [((0, 1), False), ((2, 3), False)]
    assert len({site.label for site in sites_of([[[PATH, listing(1)]], [], [[PATH, listing(2)]], []], NODES)}) == 2


def test_a_url_is_one_place_whoever_listed_it():
    assert sites(URL, listing(None), None) == [((0, 1, 2, 3), True)]


def test_what_is_found_at_one_level_is_one_inventory():
    found = merged([Inventory("x", problems=("a",)), Inventory("y"), Inventory("x", problems=("b",))])

    assert found == [Inventory("x", problems=("a", "b")), Inventory("y")]


def test_levels_that_differ_on_one_node_are_an_error_that_names_both_ranks_and_what_they_have():
    urls = [[URL, PATH], [URL, PATH], [URL, PATH], [URL, "s3://key:secret@bucket/other"]]

    with pytest.raises(ConfigError, match=f"ranks 2 and 3 are on one node.*{PATH}.*other'") as raised:
        check_levels(urls, NODES)

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("second", [[PATH, URL], [URL]])
def test_neither_may_their_order_or_number_differ(second):
    with pytest.raises(ConfigError, match="ranks 0 and 1 "):
        check_levels([[URL, PATH], second, [], []], NODES)
