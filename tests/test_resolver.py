"""From what the levels hold to the order in which a restart tries it."""

from dataclasses import replace

from support.names import START

from lazysnap.resolver import Choice, Entry, Inventory, can_repeat, candidates


def entry(step: int, *, level: str = "disk", run: int = 1, rank: int = 0, world: int = 1) -> Entry:
    distance = {"memory": 0, "disk": 1, "s3": 2}[level]
    return Entry(level, f"{run:016x}", START, step, rank, world, distance=distance)


def resolve(*entries: Entry, step: int | None = None) -> list[tuple[int, int, list[list[str]]]]:
    plans = candidates([Inventory("any", entries)], Choice(step=step))
    return [
        (int(plan.run_id, 16), plan.step, [[offer.level for offer in offers] for offers in plan.sources])
        for plan in plans
    ]


def test_nothing_gives_no_plan():
    assert resolve() == []


def test_the_newest_step_comes_first_and_its_fastest_level():
    got = resolve(entry(3, level="s3"), entry(5), entry(5, level="memory"), entry(4))

    assert got == [(1, 5, [["memory", "disk"]]), (1, 4, [["disk"]]), (1, 3, [["s3"]])]


def test_the_newest_run_comes_first_whatever_its_step():
    assert [plan[:2] for plan in resolve(entry(1000, run=1), entry(5, run=2))] == [(2, 5), (1, 1000)]


def test_a_snapshot_is_complete_when_every_rank_is_at_some_level():
    got = resolve(
        entry(7, rank=0, world=2),
        entry(6, rank=0, world=2, level="memory"),
        entry(6, rank=1, world=2, level="s3"),
        entry(8, rank=1, world=2),
        entry(8, rank=0, world=3),
    )

    assert got == [(1, 6, [["memory"], ["s3"]])]
    assert (
        candidates(
            [Inventory("any", (entry(6, rank=0, world=2, level="memory"), entry(6, rank=1, world=2, level="s3")))]
        )[0].level
        == "s3"
    )


def test_a_step_can_be_asked_for():
    assert [plan[1] for plan in resolve(entry(3), entry(5), step=3)] == [3]
    assert resolve(entry(3), step=4) == []


def in_memory(step: int, *, is_repeatable: bool = True, **facts: int) -> Entry:
    return replace(entry(step, level="memory", **facts), is_repeatable=is_repeatable)


def can_be_repeated(*entries: Entry) -> bool:
    return can_repeat(candidates([Inventory("any", entries)]))


def test_the_newest_step_is_trained_again_where_all_ranks_have_it_and_the_one_before_in_memory():
    first, second = ({"rank": rank, "world": 2} for rank in (0, 1))
    before = (in_memory(5, **first), in_memory(5, **second))
    newest = (in_memory(6, **first), in_memory(6, **second))

    assert can_be_repeated(*before, *newest)
    assert can_be_repeated(*before, *newest, entry(4, **first), entry(6, **first))
    assert not can_be_repeated(*newest)
    assert not can_be_repeated(*before, newest[0], in_memory(6, is_repeatable=False, **second))
    assert not can_be_repeated(*before, newest[0], entry(6, **second))
    assert not can_be_repeated(before[0], entry(5, **second), *newest)


def test_no_step_is_trained_again_behind_another_one_than_the_step_before_of_the_same_start():
    assert not can_be_repeated(in_memory(4), in_memory(6))
    assert not can_be_repeated(in_memory(5, run=1), in_memory(6, run=2))
    assert not can_be_repeated(replace(in_memory(5), start="0" * 16), in_memory(6))
    assert not can_be_repeated(in_memory(5), replace(in_memory(6), start="0" * 16), in_memory(6))
