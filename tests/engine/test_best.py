"""The best snapshots by a metric are kept, and found as ``"best"``, by names alone."""

import math

import pytest
from small_training import TIMEOUT_S, end
from support.stored import names_at
from support.waiting import until

import lazysnap
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.shard.best import BestName, best_first
from lazysnap.shard.names import is_keep_name


def kept(directory):
    """Values and steps of the names at a level."""
    parsed = [BestName.parse(name) for name, _ in names_at(directory)]
    return sorted((name.value, name.step) for name in parsed if name is not None)


def judge(training, values, *, first=1, **wish):
    """Train a step for each value, and give that to the engine once the step is stored."""
    steps = []
    for step, value in enumerate(values, first):
        training.run(step, step)
        assert training.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
        steps.append(training.engine.keep_best("val_loss", value, **wish))
    return steps


def stored(training, directory, count):
    """Wait until the level has that many names."""
    until(lambda: len(kept(directory)) == count)


# -------------------------------------------------------------------- the names


@pytest.mark.parametrize("metric", ["val_loss", "val/loss", "a" * 80, "präzision@5", "-x-min-1-2"])
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [0.0, -0.125, 1e30, -1.23456789e-300, 0.1, 3.0, 5e-324])
def test_a_name_says_what_it_was_made_of(metric, mode, value):
    name = BestName.of(metric, mode, value, 9_999_999_999)

    assert is_keep_name(name.text)
    assert BestName.parse(name.text) == name
    assert math.isclose(name.value, value, rel_tol=1e-8)


@pytest.mark.parametrize("text", ["best", "best-", "before-anneal", "best-loss-min-nan-3", "best-loss-0.5-3", "latest"])
def test_other_names_are_no_names_of_keep_best(text):
    assert BestName.parse(text) is None


def test_the_best_is_first_and_of_equal_values_the_earlier_one():
    def name(mode, value, step):
        return {BestName.of("acc", mode, value, step).text}

    lowest = [("c", name("min", 0.3, 5)), ("b", name("min", 0.2, 4)), ("a", name("min", 0.2, 3))]
    highest = [("c", name("max", 0.3, 5)), ("b", name("max", 0.2, 4)), ("a", name("max", 0.2, 3))]

    assert best_first(lowest) == ["a", "b", "c"]
    assert best_first(highest) == ["c", "a", "b"]
    assert best_first([*lowest, ("mine", {"best"})]) == ["mine"]
    with pytest.raises(SnapshotNotFound, match=r"acc \(max\), acc \(min\)"):
        best_first([*lowest, *highest])


# -------------------------------------------------------------------- in a training


def test_the_best_snapshots_outlive_all_others_and_the_best_is_found_by_every_reader(job, tmp_path):
    training = job.start(tmp_path)
    facts = {}
    steps = []
    for step, value in enumerate([0.5, 0.3, 0.4, 0.6, 0.35], 1):
        steps += judge(training, [value], first=step, count=2)
        facts[step] = training.model[0].weight.detach().clone()
    training.run(6, 8)
    end(training)

    assert steps == [1, 2, 3, None, 5]
    until(lambda: kept(tmp_path) == [(0.3, 2), (0.35, 5)])
    assert lazysnap.load_weights(tmp_path, "best")["0.weight"].equal(facts[2])
    assert lazysnap.export(tmp_path, tmp_path / "best.safetensors", which="best").step == 2
    other = job.start(tmp_path, ready=False)
    assert other.engine.restore("best").step == 2
    assert other.model[0].weight.equal(facts[2])


@pytest.mark.slow
def test_greater_values_may_be_better_and_a_tie_changes_nothing(job, tmp_path):
    training = job.start(tmp_path)

    assert judge(training, [0.5, 0.5, 0.7, 0.7, 0.6], mode="max") == [1, None, 3, None, None]

    end(training)
    assert kept(tmp_path) == [(0.7, 3)]


@pytest.mark.slow
def test_a_value_that_is_no_number_is_never_the_best_and_said_once(job, tmp_path, caplog):
    training = job.start(tmp_path)

    assert judge(training, [math.nan, -math.inf, 0.5, math.nan, 0.4]) == [None, None, 3, None, 5]

    assert [record.message for record in caplog.records if "keep_best" in record.message] == [
        "keep_best: val_loss is nan, which is never among the best (reported once)"
    ]
    end(training)
    assert kept(tmp_path) == [(0.4, 5)]


@pytest.mark.slow
def test_a_restart_knows_the_best_of_its_run_from_their_names(job, tmp_path):
    training = job.start(tmp_path)
    judge(training, [0.5, 0.3], count=2)
    stored(training, tmp_path, 2)
    job.crash(training)

    again = job.start(tmp_path, ready=False)
    assert again.engine.restore().step == 2
    assert judge(again, [0.6, 0.4, 0.35], first=3, count=2) == [None, 4, 5]
    end(again)
    assert kept(tmp_path) == [(0.3, 2), (0.35, 5)]


@pytest.mark.slow
def test_another_run_has_best_snapshots_of_its_own_and_those_of_the_run_that_was_left_stay(job, tmp_path):
    training = job.start(tmp_path)
    judge(training, [0.5, 0.1])
    stored(training, tmp_path, 2)  # the first goes at the next call, or at the end
    end(training)

    other = job.start(tmp_path, ready=False)
    judge(other, [0.4, 0.2])
    end(other)

    assert kept(tmp_path) == [(0.1, 2), (0.2, 2)]
    third = job.start(tmp_path, ready=False)
    assert third.engine.restore("best").step == 2
    assert judge(third, [0.3], first=3) == [3]  # it is a run of its own, which has none yet


@pytest.mark.slow
def test_behind_a_rollback_the_best_of_the_run_that_was_left_do_not_count(job, tmp_path):
    training = job.start(tmp_path)
    judge(training, [0.5, 0.1])
    stored(training, tmp_path, 2)
    assert training.engine.rollback(steps=2).step == 1

    assert judge(training, [0.3], first=2) == [2]


@pytest.mark.slow
def test_the_one_before_stays_at_a_slower_level_until_that_has_the_better_one(job, tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    training = job.start(fast, slow)
    judge(training, [0.5])
    until(lambda: kept(slow) == [(0.5, 1)])
    slow.rename(tmp_path / "away")
    slow.write_text("no directory")
    judge(training, [0.3, 0.6, 0.7], first=2)
    assert (0.5, 1) in kept(fast)
    assert (0.3, 2) in kept(fast)

    slow.unlink()
    (tmp_path / "away").rename(slow)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    until(lambda: (0.3, 2) in kept(slow))
    judge(training, [0.8], first=5)
    until(lambda: kept(fast) == kept(slow) == [(0.3, 2)])


def test_what_cannot_be_kept_is_refused(job, tmp_path):
    engine = job.start(tmp_path, ready=False).engine

    for wish in ({"mode": "low"}, {"count": 0}, {"count": True}):
        with pytest.raises(ConfigError, match="KeepBest"):
            engine.keep_best("val_loss", 0.5, **wish)
    with pytest.raises(ConfigError, match="no persistent level"):
        job.start(ready=False).engine.keep_best("val_loss", 0.5)
