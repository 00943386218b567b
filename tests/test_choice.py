"""What ``which`` means: the same for a restart and for whoever reads a level."""

import pytest

import lazysnap
from lazysnap.errors import ConfigError
from lazysnap.levels.store import open_storage
from lazysnap.resolver import ANY, Choice, SnapshotKey, means_snapshot
from lazysnap.snapshots.catalogue import Catalogue

RUN, OTHER = "1f3a" * 4, "2b4c" * 4


MEANINGS = {
    "latest": Choice(),
    7: Choice(step=7),
    0: Choice(step=0),
    "best": Choice(name="best"),
    "run:1f3a": Choice(run="1f3a"),
    "run:2B4C@200": Choice(step=200, run="2b4c"),
}


@pytest.mark.parametrize("which", MEANINGS, ids=str)
def test_a_choice_is_read(which):
    assert Choice.of(which) == MEANINGS[which]
    assert Choice.of(which).is_latest == (which == "latest")
    assert means_snapshot(which) == (which == "latest" or str(which).startswith("run:"))


@pytest.mark.parametrize("which", [True, None, 1.5, -1, [7]], ids=repr)
def test_what_is_no_step_and_no_text_is_refused_by_every_reader(which, tmp_path):
    for read in (Choice.of, lambda which: lazysnap.export(tmp_path, tmp_path / "out.safetensors", which=which)):
        with pytest.raises(ConfigError, match='which must be "latest", a step, a name or a run'):
            read(which)
    with pytest.raises(ConfigError, match="which must be"):
        lazysnap.load_weights(tmp_path, which)


def test_a_run_that_is_named_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'run:1f3a' names a run, and run 2b4c is given as well: give one of them"):
        Catalogue(open_storage(str(tmp_path))).find("run:1f3a", "2b4c")


@pytest.mark.parametrize(
    ("wanted", "is_included"),
    [
        (ANY, True),
        (Choice(step=7, name="best", run=RUN), True),
        (Choice(step=8), False),
        (Choice(name="other"), False),
        (Choice(run=RUN[:4]), True),
        (Choice(run=OTHER), False),
        (Choice(step=7, run=OTHER), False),
    ],
    ids=str,
)
def test_each_limit_counts(wanted, is_included):
    assert wanted.includes(SnapshotKey(RUN, 7, "", 1), {"best", "last"}) == is_included
