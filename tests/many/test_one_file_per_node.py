"""``aggregate="node"``: the ranks of a node in one file, written by the first of them, whoever dies meanwhile."""

import os

import pytest
from jobs import until
from rank_keepers import keepers

from lazysnap.levels import open_store
from lazysnap.resolver import candidates

NODE = ["node-00000-of-00001.json", "node-00000-of-00001.safetensors"]


def node_level(root, name="level", **settings):
    return {"url": str(root / name), "every_n_steps": 1, "keep_last": 2, "aggregate": "node", **settings}


@pytest.fixture
def job(make_job, tmp_path):
    return make_job(levels=[node_level(tmp_path)])


def files(job, name="level"):
    """Names of all files at a level, by directory."""
    return {place.name: sorted(path.name for path in place.iterdir()) for place in (job.root.parent / name).iterdir()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_resume_from_the_file_of_their_node_as_if_nothing_had_happened(make_job, tmp_path, end_keepers, kind):
    whole, broken = make_job("whole", levels=[]), make_job("broken", levels=[node_level(tmp_path)])
    assert set(whole.run(kind, 2)) == {0}, whole.output()

    assert set(broken.run(kind, 2, stop_at=4, wait_durable=True)) == {9}, broken.output()
    [stopped], owned = broken.stopped(), broken.own("stopped")
    end_keepers(broken)
    assert set(broken.run(kind, 2)) == {0}, broken.output()

    assert broken.origins() == [["4", broken.levels[0]["url"], stopped]] * 2, broken.output()
    assert broken.own("resumed") == owned
    assert broken.results() == whole.results()
    # Two objects for each of the snapshots that are kept, whatever the number of ranks.
    assert files(broken) == {f"step-{step:08d}": NODE for step in (7, 8)}


@pytest.mark.parametrize(
    ("taken", "world", "others"),
    [("fsdp", 4, [("fsdp", 2), ("plain", 1)]), ("ddp", 2, [("fsdp", 4), ("ddp", 1)])],
)
def test_the_file_of_a_node_fits_any_other_world(job, end_keepers, taken, world, others):
    job.run(taken, world, stop_at=3, wait_durable=True)
    stopped = job.stopped()
    assert len(stopped) == 1, job.output()
    end_keepers(job)

    for kind, ranks in others:
        assert set(job.run(kind, ranks, look=True)) == {0}, job.output()
        assert job.origins() == [["3", job.levels[0]["url"], *stopped]] * ranks
    assert set(job.run("fsdp", 2, dcp=job.levels[0]["url"])) == {0}, job.output()
    assert [line[2:] for line in job.events("loaded")] == [["3", *stopped]] * 2


def complete_there(url):
    """Steps that a restart would try, the newest first."""
    return [plan.step for plan in candidates([open_store(url).inventory()])]


def whole_there(url):
    """Steps that are complete at a level, every byte read back; nothing half is there that a restart would see."""
    store = open_store(url)
    inventory = store.inventory()
    assert inventory.problems == ()
    plans = candidates([inventory])
    for plan in plans:
        for offers in plan.sources:
            store.verify_entry(offers[0])
    return [plan.step for plan in plans]


LEAD = [
    "keeper.node.gather:3",
    "keeper.node.gathered:3",
    "level.store.publish_shard:3",
    "level.store.commit:3",
    "level.store.committed:3",
    "keeper.node.tell:3",
    "keeper.node.told:3",
    "level.store.uncommitted:1",
    "level.store.deleted:1",
]
MEMBER = ["keeper.node.followed:3", "keeper.attached:1", "keeper.memory.make:2"]
EVERYWHERE = {0: LEAD, 1: MEMBER}


@pytest.fixture(scope="module")
def undisturbed(make_shared_job):
    known = {}

    def ask(steps):
        if steps not in known:
            job = make_shared_job(f"undisturbed{steps}", levels=[])
            assert set(job.run("ddp", 2, steps=steps)) == {0}, job.output()
            known[steps] = job.results()
        return known[steps]

    return ask


@pytest.mark.parametrize(("victim", "and_memory"), [(0, False), (1, False), (0, True)])
def test_a_rank_lost_with_its_keeper_anywhere_leaves_whole_snapshots(job, end_keepers, undisturbed, victim, and_memory):
    """One training that loses the trainer and the keeper of a rank, or of all, at one point after the other."""
    url, held, steps = job.levels[0]["url"], 0, 200
    for point in EVERYWHERE[victim]:
        codes = job.run("ddp", 2, steps=steps, faults={victim: f"{point}:kill-both"})
        assert -9 in codes, (point, codes, job.output())
        if job.events("resumed"):
            assert job.resumed() >= held, (point, job.output())
        if and_memory:
            end_keepers(job)
        held = max([held, *whole_there(url)])

    assert set(job.run("ddp", 2, steps=steps)) == {0}, job.output()

    assert job.resumed() >= held
    assert job.results() == undisturbed(steps)
    assert files(job) == {f"step-{step:08d}": NODE for step in (steps - 1, steps)}


ALONE = [(0, point.split(":")[0]) for point in LEAD if "node" in point or "store.commit" in point]
ALONE += [(1, "keeper.node.followed")]


@pytest.mark.parametrize(("victim", "point"), ALONE)
def test_a_keeper_that_is_killed_alone_costs_the_level_the_snapshots_of_that_moment(job, undisturbed, victim, point):
    """Another one takes its place, and the slots; what was begun is done again, or left out, and the next are made.

    The next keeper would die there, too, but does not come so far.
    """
    [level] = job.levels
    level["keep_last"] = 30
    # Until step 17 the keeper is killed: all slots but one may be ahead of it. Then training waits for the next one.
    waits = {str(victim): {"renewed_at": 18}}
    faults = {victim: f"{point}:14:kill"}
    assert set(job.run("ddp", 2, steps=24, faults=faults, by_rank=waits)) == {0}, job.output()

    assert job.results() == undisturbed(24)
    assert [line[2] for line in job.events("renewed")] == ["True"]
    steps = whole_there(level["url"])
    begun = job.begun(0) & job.begun(1)
    assert set(range(18, 25)) <= begun
    # Nothing of before its death, nothing from when the next one is there.
    assert begun - set(steps) <= set(range(13, 18)), job.output()
    assert all(names == NODE for names in files(job).values())


@pytest.mark.parametrize(
    ("first", "second"), [("engine.gated:5", "capture.commit:5"), ("capture.commit:5", "engine.gated:5")]
)
def test_what_all_have_in_memory_goes_to_the_file_of_the_node_when_they_died(make_job, tmp_path, first, second):
    """The newest that each rank has is not the same: the newest that both have is written at once."""
    job = make_job(levels=[node_level(tmp_path, every_n_steps=1000, timeout_s=600)])
    codes = job.run("ddp", 2, faults={0: f"{first}:kill", 1: f"{second}:kill"}, linger_s=5.0)
    assert codes == [-9, -9], job.output()
    gated = [{int(line[2]) for line in job.events("gated") if line[0] == rank} for rank in "01"]
    newest = max(gated[0] & gated[1])
    # They leave when each knows that the other one has nothing more for it, long before a deadline.
    until(lambda: not keepers(job), job.output, timeout_s=60)
    assert complete_there(job.levels[0]["url"])[0] >= newest

    assert set(job.run("ddp", 2, look=True)) == {0}, job.output()

    assert job.resumed() >= newest
    assert {line[1] for line in job.origins()} == {job.levels[0]["url"]}


def test_a_step_that_one_rank_lost_is_left_out_at_the_level_and_the_next_goes_on(job):
    job.levels[0]["keep_last"] = 20
    assert set(job.run("ddp", 2, steps=9, faults={1: "engine.begin:4:raise"})) == {0}, job.output()

    begun = [job.begun(rank) for rank in (0, 1)]
    assert len(begun[0] - begun[1]) == 1, job.output()
    assert sorted(whole_there(job.levels[0]["url"])) == sorted(begun[0] & begun[1])
    assert "rank 1 of this node: it has not captured step" in job.output()


def test_a_clock_that_was_set_back_between_two_starts_costs_nothing(job):
    """What keepers and levels hold of the first start is older for them, whatever the clock says."""
    job.levels[0]["keep_last"] = 20
    assert set(job.run("ddp", 2, stop_at=4, wait_durable=True)) == {9}, job.output()

    # The second rank is later at each boundary: the lead asks for what its keeper has not heard of.
    assert set(job.run("ddp", 2, clock_s=-10_000, by_rank={"1": {"lag_s": 0.2}})) == {0}, job.output()

    assert job.resumed() == 4
    assert "is not persisted" not in job.output()
    begun = {int(line[2]) for line in job.events("begun")}
    assert {7, 8} <= begun
    assert begun <= set(whole_there(job.levels[0]["url"]))


def test_a_rank_that_does_not_aggregate_is_named_before_the_first_step(job):
    levels = [{**job.levels[0], "aggregate": "rank"}]

    codes = job.run("ddp", 2, steps=4, by_rank={"1": {"levels": levels}})

    assert 0 not in codes
    assert job.output().count("levels[0].aggregate is 'node' and 'rank'") == 2


def test_damage_in_the_part_of_one_rank_sends_all_to_the_snapshot_before(job, end_keepers):
    job.run("ddp", 2, stop_at=4, wait_durable=True)
    end_keepers(job)
    store = open_store(job.levels[0]["url"])
    newest, older = candidates([store.inventory()])[:2]
    entry = newest.sources[1][0]
    manifest = store.read_manifest(entry)
    path = job.root.parent / "level" / store.place(entry).shard_path
    layout = manifest.layout(path.read_bytes(), "place")
    with open(path, "r+b") as file:
        file.seek(layout.offsets[0])
        byte = file.read(1)
        file.seek(layout.offsets[0])
        file.write(bytes([byte[0] ^ 1]))

    assert set(job.run("ddp", 2, look=True)) == {0}, job.output()

    assert job.resumed() == older.step < newest.step
    assert "node-00000-of-00001.safetensors: block" in job.output()


@pytest.mark.parametrize("first", ["rank", "node"])
def test_a_slower_level_gets_the_file_of_the_node_from_a_faster_one(make_job, tmp_path, end_keepers, first):
    fast = node_level(tmp_path, "fast", aggregate=first)
    job = make_job(levels=[fast, node_level(tmp_path, "slow", every_n_steps=3, keep_last=3)])
    assert set(job.run("ddp", 2, steps=10, stop_at=9, wait_durable=True)) == {9}, job.output()
    stopped = job.stopped()
    until(lambda: complete_there(job.levels[1]["url"])[:1] == [9], job.output)
    end_keepers(job)
    assert all(names == NODE for names in files(job, "slow").values())
    assert all((names == NODE) == (first == "node") for names in files(job, "fast").values())

    assert set(job.run("ddp", 2, look=True, levels=job.levels[1:])) == {0}, job.output()

    assert job.origins() == [["9", job.levels[1]["url"], *stopped]] * 2


def test_immutable_tensors_are_written_once_beside_the_files_of_nodes(job, end_keepers):
    assert set(job.run("ddp", 2, stop_at=4, wait_durable=True, base=True)) == {9}, job.output()
    stopped = job.stopped()
    end_keepers(job)
    assert sorted(name.split("-")[0] for name in files(job)) == ["frozen", "step", "step"]

    assert set(job.run("ddp", 2, look=True, base=True)) == {0}, job.output()

    assert job.origins() == [["4", job.levels[0]["url"], *stopped]] * 2


def test_files_of_nodes_and_of_ranks_that_are_no_more_go(job, end_keepers):
    """Whatever a level held before, and in whatever form: retention leaves nothing of it behind."""
    alone = [{**job.levels[0], "aggregate": "rank"}]
    for kind, world, levels, last in (("fsdp", 4, job.levels, 3), ("ddp", 2, alone, 6), ("ddp", 2, job.levels, 9)):
        job.run(kind, world, stop_at=last, wait_durable=True, levels=levels, steps=20)
        assert job.resumed() == last - 3, job.output()
        end_keepers(job)
    assert set(job.run("ddp", 2, steps=12)) == {0}, job.output()
    assert files(job) == {f"step-{step:08d}": NODE for step in (11, 12)}

    assert set(job.run("plain", 1, steps=15)) == {0}, job.output()

    ranks = ["rank-00000-of-00001.json", "rank-00000-of-00001.safetensors"]
    assert set(map(tuple, files(job).values())) == {tuple(ranks)}


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of its own needs root")
@pytest.mark.parametrize(
    ("hosts", "stems"), [("aabb", "node-0-of-2 node-1-of-2"), ("abca", "node-0-of-3 rank-1 rank-2")]
)
def test_each_node_has_a_file_and_a_rank_that_is_alone_on_its_node_has_its_own(job, end_keepers, hosts, stems):
    on = {str(rank): {"host": f"machine-{host}"} for rank, host in enumerate(hosts)}
    assert set(job.run("fsdp", 4, stop_at=4, wait_durable=True, by_rank=on)) == {9}, job.output()
    stopped = job.stopped()

    names = [file.split(".")[0] for file in files(job)["step-00000004"]]
    expected = {"node-0-of-2": "node-00000-of-00002", "node-1-of-2": "node-00001-of-00002"}
    expected |= {"node-0-of-3": "node-00000-of-00003", "rank-1": "rank-00001-of-00004", "rank-2": "rank-00002-of-00004"}
    assert names == [expected[stem] for stem in stems.split() for _ in range(2)]
    assert set(job.run("fsdp", 2, look=True)) == {0}, job.output()
    assert job.origins() == [["4", job.levels[0]["url"], *stopped]] * 2
