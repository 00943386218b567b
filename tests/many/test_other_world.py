"""Another number of ranks, another mesh, another strategy: weights and optimizer come back bit for bit."""

import pytest

import lazysnap

STEP = 3
MODEL = {"tied": True, "base": True}


@pytest.mark.parametrize(
    ("taken", "world", "place", "others"),
    [
        ("fsdp", 4, "memory", [("fsdp", 2), ("plain", 1)]),
        ("ddp", 2, "memory", [("ddp", 4)]),
        ("ddp", 2, "storage", [("fsdp", 4), ("fsdp", 1)]),
        ("tp", 4, "storage", [("ddp", 2), ("hsdp", 4)]),
    ],
)
def test_a_snapshot_fits_any_other_world(job, end_keepers, taken, world, place, others):
    """With tied weights and a frozen base. A mesh of one rank is one of DTensors all the same."""
    job.run(taken, world, **MODEL, stop_at=STEP, wait_durable=place == "storage")
    stopped, owned = job.stopped(), job.own("stopped")
    assert len(stopped) == 1, job.output()
    if place == "storage":
        end_keepers(job)

    for kind, ranks in others:
        assert set(job.run(kind, ranks, **MODEL, look=True)) == {0}, job.output()
        assert {step for step, _, _ in job.origins()} == {str(STEP)}, job.output()
        assert [level == "memory" for _, level, _ in job.origins()] == [place == "memory"] * ranks
        assert {digest for *_, digest in job.origins()} == stopped, (kind, ranks)
        # Each gets what is of some rank alone; but what was drawn cannot be continued by another number of ranks: each
        # is told, and draws its own.
        mine, theirs = job.own("resumed"), [owned[rank % world] for rank in range(ranks)]
        assert [found[:2] for found in mine] == [found[:2] for found in theirs]
        if ranks == world:
            assert mine == owned
        else:
            assert job.output().count(f"captured by {world} ranks and is resumed by {ranks}:") == 1
            assert len({draws for *_, draws in (*mine, *owned)}) == ranks + world
        assert ("random numbers are new" in job.output()) == (ranks != world)


@pytest.mark.parametrize(("taken", "kind", "ranks"), [("ddp", "fsdp", 3), ("fsdp", "plain", 1)])
def test_stock_torch_loads_an_export_of_what_several_ranks_took(job, taken, kind, ranks):
    job.run(taken, 2, stop_at=STEP, wait_durable=True)
    stopped = job.stopped()

    exported = lazysnap.export(job.levels[0]["url"], job.root / "exported")
    assert exported.step == STEP
    assert set(job.run(kind, ranks, dcp=exported.path)) == {0}, job.output()

    assert [line[2:] for line in job.events("loaded")] == [[*stopped]] * ranks
