"""Which ranks look at one place together: those that see the same directories, and no others."""

from support.names import directory_of

from lazysnap.resolver import Inventory
from lazysnap.restore.survey import merged, sites_of
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
