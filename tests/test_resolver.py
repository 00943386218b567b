"""From what the levels hold to the order in which a restart tries it."""

from support.names import START

from lazysnap.resolver import Entry, Inventory, Wanted, candidates


def entry(step: int, *, level: str = "disk", run: int = 1, rank: int = 0, world: int = 1) -> Entry:
    speed = {"memory": 0, "disk": 1, "s3": 2}[level]
    return Entry(level, speed, f"{run:016x}", START, step, rank, world, f"step-{step:08d}")


def resolve(*entries: Entry, step: int | None = None) -> list[tuple[int, int, list[list[str]]]]:
    plans = candidates([Inventory("any", entries)], Wanted(step=step))
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
