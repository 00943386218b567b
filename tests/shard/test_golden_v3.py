"""The shard of a node, version 3: what was written stays readable, and is what is written; nothing else is believed."""

import json

import golden
import pytest
import torch
from safetensors.torch import load_file

from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.keeper.node_source import FilePart, NodeSource
from lazysnap.levels import open_store
from lazysnap.levels.verified import VerifiedReader
from lazysnap.shard.checksum import ALGORITHM, Checksums, digest
from lazysnap.shard.layout import PAGE
from lazysnap.shard.manifest import Manifest, directory_name

FOLDER = golden.FOLDER_3 / directory_name(3000)
RANKS = (2, 3, 4)


def test_the_golden_file_is_read_back_value_by_value_rank_by_rank():
    store = open_store(str(golden.FOLDER_3))
    inventory = store.inventory()
    assert inventory.problems == ()
    assert [(entry.rank, entry.world_size, entry.file) for entry in inventory.entries] == [
        (rank, 5, "node-00001-of-00002") for rank in RANKS
    ]
    for entry in inventory.entries:
        store.verify_entry(entry)
    with golden.opened(golden.FOLDER_3) as shards:
        states = [golden.assembled(shard).state(shard.meta, lambda name: None) for shard in shards]
    for rank, state in zip(RANKS, states, strict=True):
        expected = golden.state_3(rank)
        assert state["loop"] == expected["loop"]
        for found, wanted in [
            *((state["net"][name], tensor) for name, tensor in expected["net"].items()),
            *((state[name], expected[name]) for name in ("wide", "mask", "none")),
        ]:
            assert found.dtype is wanted.dtype
            assert torch.equal(found, wanted)


def test_the_same_ranks_give_the_golden_bytes():
    found = {
        str(path.relative_to(golden.FOLDER_3)): path.read_bytes()
        for path in golden.FOLDER_3.rglob("*")
        if path.is_file()
    }

    assert golden.make_3() == found


def test_any_safetensors_tool_opens_it_and_each_rank_begins_on_a_page():
    shard = FOLDER / golden.STEM_3.shard
    tensors = load_file(shard)
    assert {name for name in tensors if name.startswith("rank-00003/")} == {
        f"rank-00003/{name}" for name in ("net.weight", "net.half", "wide", "mask", "none")
    }
    assert sorted(name for name in tensors if not name.startswith("rank-")) == ["padding-00001", "padding-00002"]
    assert not any(tensors[f"padding-0000{n}"].any() for n in (1, 2))
    data = shard.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for rank in RANKS:
        starts = [item["data_offsets"][0] for name, item in header.items() if name.startswith(f"rank-0000{rank}/")]
        assert min(starts) % PAGE == 0
    assert header["__metadata__"]["rank-00003/net.tied"] == "rank-00003/net.weight"


@pytest.mark.parametrize("name", [golden.STEM_3.shard, golden.STEM_3.manifest])
def test_every_flipped_byte_is_found(name, tmp_path):
    target = tmp_path / directory_name(3000)
    target.mkdir()
    for path, data in golden.make_3().items():
        (tmp_path / path).write_bytes(data)
    data = (target / name).read_bytes()
    store = open_store(str(tmp_path))
    entries = store.inventory().entries
    # Padding of the header and between the ranks is compared, too; every seventh byte keeps the test short.
    for at in range(0, len(data), 7):
        (target / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ShardCorrupt):
            store.verify_entry(entries[0])


def test_damage_in_one_rank_leaves_the_others_readable(tmp_path):
    for path, data in golden.make_3().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    store = open_store(str(tmp_path))
    entries = store.inventory().entries
    with golden.opened(tmp_path) as shards:
        spans = {shard.rank: shard.layout.find("wide") for shard in shards}
    shard = tmp_path / store.place(entries[0]).shard_path
    data = bytearray(shard.read_bytes())
    data[spans[3][1]] ^= 1
    shard.write_bytes(data)

    with golden.opened(tmp_path) as shards:
        for shard in shards:
            assembly = golden.assembled(shard)
            if shard.rank != 3:
                assembly.state(shard.meta, lambda name: None)
                continue
            with pytest.raises(ShardCorrupt, match=r"node-00001-of-00002\.safetensors: block"):
                assembly.state(shard.meta, lambda name: None)


def manifest_bytes(change) -> bytes:
    """The golden manifest with something changed and a right digest."""
    fields = json.loads((FOLDER / golden.STEM_3.manifest).read_bytes())["manifest"]
    change(fields)
    body = json.dumps(fields).encode()
    return b'{"digest":"%s:%s","manifest":%s}\n' % (ALGORITHM.encode(), digest(body).encode(), body)


def at(*path, value=...):
    """A change of one place in the manifest; ``...`` takes it away."""

    def change(fields):
        for part in path[:-1]:
            fields = fields[part]
        if value is ...:
            del fields[path[-1]]
        else:
            fields[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        at("version", value=2),
        at("members"),
        at("members", value=[]),
        at("members", value={}),
        at("members", 0, value=None),
        at("members", 0, "state"),
        at("members", 0, "rank", value=3),
        at("members", 0, "rank", value=5),
        at("members", 0, "run_id", value="0123456789abcdef"),
        at("members", 0, "surprise", value=1),
        at("members", 0, "aliases", value=[]),
        at("rank", value=2),
        at("state", value=None),
        at("run_id"),
        at("generation", value="x"),
        at("world_size", value=4),
        at("shard", "file", value="rank-00002-of-00005.safetensors"),
        at("shard", "file", value="node-1-of-2.safetensors"),
        at("shard", "file", value="../node-00001-of-00002.safetensors"),
        at("shard", "file", value=None),
        at("shard", "size_bytes", value=8),
    ],
)
def test_a_manifest_with_a_right_digest_and_wrong_content_is_refused(change):
    Manifest.decode(manifest_bytes(lambda fields: None), "place")
    with pytest.raises(ShardCorrupt, match="place"):
        Manifest.decode(manifest_bytes(change), "place")


def test_a_rank_that_is_not_in_the_file_is_refused():
    manifest = Manifest.decode((FOLDER / golden.STEM_3.manifest).read_bytes(), "place")

    with pytest.raises(ShardCorrupt, match="place: does not hold rank 1"):
        manifest.of(1, "place")


def test_parts_of_different_snapshots_are_not_put_together():
    two, three = golden.held_3(2), golden.held_3(3)
    with pytest.raises(FormatError, match="not the ranks of one snapshot"):
        NodeSource([three, two])
    three.meta = three.meta.__class__(**{**vars(three.meta), "generation": "00000000deadbeee"})
    with pytest.raises(FormatError, match="not the ranks of one snapshot"):
        NodeSource([two, three])


@pytest.mark.parametrize("length", [PAGE, 3 * PAGE])
def test_any_window_shows_the_same_bytes_and_files_serve_as_slots_do(tmp_path, length):
    """From files of the ranks, in blocks that do not begin where theirs do."""
    expected = golden.make_3()[f"{directory_name(3000)}/{golden.STEM_3.shard}"]
    store = open_store(str(tmp_path))
    parts = []
    for rank in RANKS:
        held = golden.held_3(rank)
        entry, manifest = store.write_entry(held.meta, Padded(held))
        fine = Checksums.of(held.view(0, held.size_bytes), 1000)
        parts.append(FilePart(VerifiedReader(store.place(entry), Manifest(**{**vars(manifest), "checksums": fine}))))
    source = NodeSource(parts)

    found = b"".join(bytes(source.view(offset, length)) for offset in range(0, len(expected), length))

    assert found[: len(expected)] == expected
    assert not any(found[len(expected) :])


class Padded:
    """A part as the source of a file of its own."""

    def __init__(self, part):
        self.size_bytes, self._part = part.size_bytes, part
        self.wait, self.finish = part.wait, part.finish

    def view(self, offset, length):
        data = bytes(self._part.view(offset, min(length, self.size_bytes - offset)))
        return memoryview(data.ljust(length, b"\0"))
