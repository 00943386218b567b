"""The command line at levels where one file holds the ranks of a node: it is read, copied and deleted once."""

import contextlib

import pytest
import torch
from cli_level import change, files, flip, put, remove, run, run_json

from lazysnap.keeper.node_source import FilePart, NodeSource
from lazysnap.levels.shards import NodeCapture
from lazysnap.levels.store import open_store
from lazysnap.levels.verified import VerifiedReader
from lazysnap.resolver import candidates
from lazysnap.shard.stem import Stem

WORLD = 3


@pytest.fixture
def put_nodes(tmp_path):
    """Commit a snapshot of three ranks on two nodes, in the form of two files."""

    def make(url: str, step: int, *, names: tuple[str, ...] = ()) -> None:
        scratch, store = open_store(str(tmp_path / f"scratch-{step}")), open_store(url)
        with contextlib.ExitStack() as stack:
            parts = []
            for rank in range(WORLD):
                state = {"model": {"w": torch.full((1001,), float(step + rank))}, "step": step}
                entry = put(scratch.url, step, state, rank=(rank, WORLD))
                reader = VerifiedReader(scratch.place(entry), scratch.read_manifest(entry))
                parts.append(FilePart(stack.enter_context(reader)))
            for node, members in enumerate((parts[:2], parts[2:])):
                capture = NodeCapture(Stem.of_node(node, 2), tuple(part.meta for part in members))
                entry, _ = store.write_entry(capture, NodeSource(members))
        for name in names:
            store.keep(entry, name)

    return make


def paths(step: int) -> list[str]:
    return [f"step-{step:08d}/node-0000{node}-of-00002.{end}" for node in (0, 1) for end in ("json", "safetensors")]


def size(url: str, step: int) -> int:
    store = open_store(url)
    return sum(store.storage.size(path) for path in paths(step) if path.endswith("safetensors"))


def test_it_is_listed_verified_and_shown_as_one_snapshot_of_three_ranks(url, put_nodes, capsys):
    put_nodes(url, 10, names=("best",))

    code, listed = run_json(capsys, "ls", url)
    (snapshot,) = listed["snapshots"]
    assert code == 0
    assert (snapshot["ranks"], snapshot["world_size"], snapshot["complete"]) == (3, 3, True)
    assert (snapshot["size_bytes"], snapshot["names"]) == (size(url, 10), ["best"])
    code, verified = run_json(capsys, "verify", url)
    assert (code, verified["size_bytes"]) == (0, size(url, 10))
    code, shown = run_json(capsys, "show", url, "10")
    assert (code, shown["size_bytes"], len(shown["checksum"])) == (0, size(url, 10), 2)
    assert [(row["name"], row["rank"], row["shape"]) for row in shown["tensors"]] == [
        ("model.w", rank, [1001]) for rank in range(3)
    ]


def test_one_flipped_byte_is_told_once_and_makes_the_snapshot_bad(url, put_nodes, capsys):
    put_nodes(url, 10)
    change(url, paths(10)[1], flip(0.99))

    code, verified = run_json(capsys, "verify", url)

    assert code == 1
    assert [item["state"] for item in verified["snapshots"]] == ["bad"]
    assert len(verified["problems"]) == 1
    assert "node-00000-of-00002.safetensors: block 0" in verified["problems"][0]


def test_a_node_that_is_missing_makes_it_incomplete(url, put_nodes, capsys):
    put_nodes(url, 10)
    remove(url, paths(10)[2])

    _, listed = run_json(capsys, "ls", url)

    assert [(item["ranks"], item["complete"]) for item in listed["snapshots"]] == [(2, False)]
    assert candidates([open_store(url).inventory()]) == []
    assert run("prune", url, "--yes") == 0
    assert paths(10)[3] not in files(url)


def test_it_is_copied_byte_for_byte_and_once(make_url, put_nodes, capsys):
    source, target = make_url("local"), make_url("memory")
    put_nodes(source, 10, names=("best",))
    put_nodes(source, 20)

    code, copied = run_json(capsys, "copy", source, target)

    assert (code, copied["size_bytes"]) == (0, size(source, 10) + size(source, 20))
    assert files(target) == files(source) == sorted([*paths(10), "step-00000010/keep-best", *paths(20)])
    for path in (path for path in files(source) if path.endswith("safetensors")):
        assert open_store(source).storage.get(path) == open_store(target).storage.get(path)
    code, again = run_json(capsys, "copy", source, target)
    assert (code, [item["state"] for item in again["snapshots"]]) == (0, ["there already"] * 2)
    assert files(target) == files(source)


def test_prune_deletes_what_retention_would(url, put_nodes, capsys):
    for step in (10, 20, 30):
        put_nodes(url, step)

    code, pruned = run_json(capsys, "prune", url, "--keep-last", "1", "--yes")

    assert code == 0
    assert [item["step"] for item in pruned["snapshots"]] == [10, 20]
    assert files(url) == paths(30)


def test_what_died_writing_it_is_swept(url, put_nodes):
    put_nodes(url, 10)
    remove(url, paths(10)[0])

    assert open_store(url).sweep() == [paths(10)[1]]

    assert files(url) == paths(10)[2:]
