"""``aggregate="node"``: the ranks of a node in one file, written by the first of them, whoever dies meanwhile."""

import pytest

from lazysnap.levels import open_store


def node_level(root, name="level", **settings):
    return {"url": str(root / name), "every_n_steps": 1, "keep_last": 2, "aggregate": "node", **settings}


@pytest.fixture
def job(make_job, tmp_path):
    return make_job(levels=[node_level(tmp_path)])


def files(job, name="level"):
    """Names of all files at a level, by directory."""
    return {
        place.name: sorted(path.name for path in place.iterdir()) for place in (job.root.parent / name).iterdir()
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_resume_from_the_file_of_their_node_as_if_nothing_had_happened(make_job, tmp_path, end_keepers, kind):
    whole, broken = make_job("whole", levels=[]), make_job("broken", levels=[node_level(tmp_path)])
    assert set(whole.run(kind, 2)) == {0}, whole.output()

    assert set(broken.run(kind, 2, stop_at=4, wait_durable=True)) == {9}, broken.output()
    stopped = broken.events("stopped")
    end_keepers(broken)
    assert set(broken.run(kind, 2)) == {0}, broken.output()

    resumed = broken.events("resumed")
    assert [tuple(line[2:4]) for line in resumed] == [("4", broken.levels[0]["url"])] * 2, broken.output()
    assert {line[4] for line in resumed} == {line[3] for line in stopped}
    assert broken.results() == whole.results()
    # Two objects for each of the snapshots that are kept, whatever the number of ranks.
    assert files(broken) == {
        f"step-{step:08d}": ["node-00000-of-00001.json", "node-00000-of-00001.safetensors"] for step in (7, 8)
    }
