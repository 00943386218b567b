"""Several ranks that die together and start again with the same world: all resume the same step, bit for bit."""

from collections import Counter

import pytest
from shards import copies, of_scope, pieces_of


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param("ddp", "memory", marks=pytest.mark.quick),
        ("fsdp", "storage"),
    ],
)
def test_ranks_resume_as_if_nothing_had_happened(make_job, end_keepers, kind, place):
    whole, broken = make_job("whole", levels=[]), make_job("broken")
    assert set(whole.run(kind, 2)) == {0}, whole.output()

    assert set(broken.run(kind, 2, stop_at=4, wait_durable=True)) == {9}, broken.output()
    [stopped], owned = broken.stopped(), broken.own("stopped")
    if place == "storage":
        end_keepers(broken)
    assert set(broken.run(kind, 2)) == {0}, broken.output()

    level = "memory" if place == "memory" else broken.levels[0]["url"]
    assert broken.origins() == [["4", level, stopped]] * 2, broken.output()
    assert broken.own("resumed") == owned
    assert len({tuple(mine) for mine in owned}) == 2
    assert broken.results() == whole.results()
    for rank in ("0", "1"):
        counts = [int(line[2]) for line in broken.events("collectives") if line[0] == rank]
        assert len(counts) == 4
        assert len(set(counts)) == 1, "behind the first boundary, which plans together, a snapshot needs no collective"


def test_rank_0_does_not_speak_for_the_others_when_its_part_is_repeated_exactly(job):
    assert 0 not in job.run("ddp", 2, stop_at=4), job.output()
    assert set(job.run("ddp", 2, verify_restart=True)) == {0}, job.output()

    output = job.output()
    assert "step 4 was trained again and is identical bit for bit: this is the part of rank 0, and every rank" in output
    assert "this training resumes exactly" not in output


def test_a_rank_that_waits_for_its_last_step_before_a_slower_one_captured_it_gets_it(job):
    job.levels[0]["every_n_steps"] = 1000
    assert set(job.run("ddp", 2, by_rank={"1": {"lag_s": 0.3}}, stop_at=3, wait_durable=True)) == {9}, job.output()

    assert [line[2:] for line in job.events("durable")] == [["3", "True"]] * 2, job.output()


def check_shards_are_stored_once(url, twice):
    """Along replicated dimensions, too. ``twice``: what TP leaves alone is on two meshes that know nothing of each
    other.
    """
    pieces = [piece for share in pieces_of(url).values() for piece in of_scope("shard", share)]
    parameters = [piece for piece in pieces if piece.name.startswith("model.")]
    expected = {piece.name: 2.0 if piece.name.split(".")[1] in twice else 1.0 for piece in parameters}
    assert copies(parameters) == expected
    assert len(expected) == 9
    # Each in one shard of all that have it, but where it is there twice.
    count = Counter((piece.name, piece.at) for piece in parameters)
    assert all(count[name, at] == expected[name] for name, at in count)
    moments = copies([piece for piece in pieces if "exp_avg" in piece.name])
    assert Counter(moments.values()) == Counter(2 * list(expected.values()))


@pytest.mark.parametrize(("kind", "twice"), [("hsdp", ()), ("tp", ("embed", "norm", "head", "scale"))])
def test_ranks_of_a_mesh_store_shards_once_and_find_their_own_state_random_numbers_included(job, kind, twice):
    assert set(job.run(kind, 4, stop_at=4, wait_durable=True)) == {9}, job.output()
    [stopped], owned = job.stopped(), job.own("stopped")
    check_shards_are_stored_once(job.levels[0]["url"], twice)

    assert set(job.run(kind, 4, look=True)) == {0}, job.output()

    assert job.origins() == [["4", "memory", stopped]] * 4
    assert job.own("resumed") == owned
    assert len({draws for *_, draws in owned}) == 4
    assert "not continued" not in job.output()


PARAMETERS = 37 * 24 + 2 * 24 + (24 + 1) * 96 + (96 + 1) * 24 + 24 * 37 + 3


def test_each_rank_captures_its_share(job):
    """Replicated state is once in the shards of a node, in equal shares.

    Of several nodes: ``test_shared_levels.py``.
    """
    assert set(job.run("ddp", 4, stop_at=1, wait_durable=True)) == {9}, job.output()

    found = {rank: of_scope("full", pieces) for rank, pieces in pieces_of(job.levels[0]["url"]).items()}
    assert len(found) == 4
    pieces = [piece for share in found.values() for piece in share]
    assert len({(piece.name, piece.at) for piece in pieces}) == len(pieces)
    assert set(copies(pieces).values()) == {1.0}
    sizes = [sum(piece.size for piece in share) for share in found.values()]
    assert sum(sizes) == 3 * PARAMETERS  # and two moments of each
    assert max(sizes) < 1.05 * min(sizes)


@pytest.mark.parametrize(("kind", "layout", "place"), [("fsdp", "aabb", "storage"), ("hsdp", "aaab", "memory")])
def test_sharded_ranks_of_two_nodes_resume_without_each_others_keepers(make_job, end_keepers, kind, layout, place):
    """With HSDP each node has a copy of its own."""
    by_rank = {str(rank): {"node": f"node-{letter}"} for rank, letter in enumerate(layout)}
    job = make_job(nodes=("node-a", "node-b"), **({"levels": []} if place == "memory" else {}))
    assert set(job.run(kind, 4, stop_at=3, by_rank=by_rank, wait_durable=place == "storage")) == {9}, job.output()
    [stopped], owned = job.stopped(), job.own("stopped")
    if place == "storage":
        end_keepers(job)

    assert set(job.run(kind, 4, look=True, by_rank=by_rank)) == {0}, job.output()

    level = "memory" if place == "memory" else job.levels[0]["url"]
    assert job.origins() == [["3", level, stopped]] * 4, job.output()
    assert job.own("resumed") == owned
