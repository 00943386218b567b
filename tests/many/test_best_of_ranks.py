"""Several ranks keep the best snapshots: the value of rank 0 counts, on all of them."""

from support.stored import names_at

from lazysnap.shard.best import best_names


def test_the_value_of_rank_0_counts(job):
    by_rank = {"0": {"values": [0.5, 0.3, 0.4, 0.6, 0.35]}, "1": {"values": [0.1, 0.2, 0.3, 0.4, 0.5]}}

    assert set(job.run("ddp", 2, steps=5, by_rank=by_rank)) == {0}, job.output()

    kept = [line[2:] for line in job.events("kept")]
    assert sorted(kept) == sorted(2 * [["1", "1"], ["2", "2"], ["3", "3"], ["4", "None"], ["5", "5"]])
    names = [name for name, _ in names_at(job.levels[0]["url"])]
    assert [(name.value, name.step) for name in best_names(names)] == [(0.3, 2), (0.35, 5)]
