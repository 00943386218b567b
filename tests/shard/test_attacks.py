"""Headers and manifests made to mislead a reader."""

import json
import tracemalloc

import pytest
from support.names import START
from support.snapshots import lone_manifest

from lazysnap.errors import FormatError
from lazysnap.shard.checksum import ALGORITHM, Checksums, digest
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.limits import MAX_VALUES
from lazysnap.shard.manifest import FORMAT_VERSION, CaptureMeta, Manifest
from lazysnap.shard.names import SnapshotName, parse_file_name

GOOD = "step-00000001-0123456789abcdef-fedcba9876543210"


def shard(entries: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: object = None, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\0" * 7,
        shard({}, length=1 << 62),
        shard({}, length=100_000_001),
        shard({}, length=3),
        shard(b"{"),
        shard(b"[]"),
        shard(b"\xff\xfe"),
        shard(b"[" * 100_000),
        shard({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12),
        shard({"a": entry(0, 8), "b": entry(12, 16)}, b"\0" * 16),
        shard({"a": entry(0, 8)}, b"\0" * 12),
        shard({"a": entry(0, 8)}, b"\0" * 4),
        shard({"a": entry(0, 8, [3])}, b"\0" * 8),
        shard({"a": entry(0, 8, [-2])}, b"\0" * 8),
        shard({"a": entry(0, 8, [2.0])}, b"\0" * 8),
        shard({"a": entry(0, 8, [True, 2])}, b"\0" * 8),
        shard({"a": entry(0, 8, [1 << 61, 1 << 61])}, b"\0" * 8),
        shard({"a": entry(-8, 0)}, b""),
        shard({"a": entry(0, 8, dtype="OBJECT")}, b"\0" * 8),
        shard({"a": entry(0, 8, dtype=["F32"])}, b"\0" * 8),
        shard({"a": {**entry(0, 8), "more": 1}}, b"\0" * 8),
        shard({"a": None}),
        shard({"__metadata__": {"a": 1}}),
        shard({"__metadata__": []}),
        shard(
            b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        ),
    ],
)
def test_a_misleading_header_is_refused(image):
    with pytest.raises(FormatError, match="place"):
        Layout.parse(image, len(image), "place")


def test_a_layout_is_read_back_as_it_was_planned():
    specs = [
        TensorSpec("a", "U8", (3,)),
        TensorSpec("b", "F64", (2, 0)),
        TensorSpec("c", "F32", (5,)),
        TensorSpec("d", "BF16", ()),
    ]
    layout = Layout.plan(specs, {"e": "c"})

    again = Layout.parse(layout.header, layout.size_bytes)

    assert len(layout.header) % 4096 == 0
    assert (again.offsets, again.metadata) == (layout.offsets, {"e": "c"})
    assert [spec.name for spec in again.specs] == ["b", "c", "d", "a"]
    assert layout.size_bytes == len(layout.header) + 20 + 2 + 3


@pytest.mark.parametrize(
    "specs", [[TensorSpec("a", "F32", ())] * 2, [TensorSpec("__metadata__", "F32", ())], [TensorSpec("a", "F31", ())]]
)
def test_a_layout_that_cannot_be_is_refused(specs):
    with pytest.raises((FormatError, KeyError)):
        Layout.plan(specs)


def manifest_bytes(**changes: object) -> bytes:
    """A manifest with some keys replaced (or removed, by ``...``) and a right digest."""
    meta = CaptureMeta("0" * 16, START, 2, 0, 1, 3, state={"x": 1})
    good = lone_manifest(meta, 8, Checksums.of(memoryview(b"12345678")), 9).encode()
    fields = json.loads(good)["manifest"]
    for name, value in changes.items():
        target = fields
        *parents, last = name.split("__")
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    body = json.dumps(fields).encode()
    return b'{"digest":"%s:%s","manifest":%s}\n' % (ALGORITHM.encode(), digest(body).encode(), body)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": "1"},
        {"version": -1},
        {"surprise": 1},
        {"shards__0__start": "x"},
        {"shards__0__parameters": {"optimizer": [1]}},
        {"shards__0__frozen": {"digest": "0" * 32}},
        {"shards__0__run_id": "../../etc/passwd"},
        {"shards__0__run_id": "0" * 15},
        {"shards__0__step": -1},
        {"shards__0__step": 1.0},
        {"shards__0__step": True},
        {"shards__0__rank": 1},
        {"shards__0__world_size": 0},
        {"shards__0__aliases": {"a": 1}},
        {"shards__0__aliases": []},
        {"shards__0__tensors": None},
        {"shards__0__tensors": {"w": None}},
        {"shards__0__tensors": {"w": 3}},
        {"shards__0__packages": {"torch": None}},
        {"shards__0__state": ...},
        {"shards__0__surprise": 1},
        {"file__name": "../node-00000-of-00001.safetensors"},
        {"file__size_bytes": -8},
        {"file__size_bytes": 1 << 40},
        {"shards__0__place__header_bytes": 9},
        {"file__checksum__algorithm": "none"},
        {"file__checksum__block_bytes": 0},
        {"file__checksum__blocks": []},
        {"file__checksum__blocks": ["x" * 32]},
        {"file__checksum__blocks": ["0" * 32]},
        {"file__checksum__whole": "0" * 32},
        {"file": None},
        {"shards": None},
        {"shards": []},
        {"shards": [None]},
        {"shards__0__place": None},
        {"shards__0__place__offset": 4096},
        {"shards__0__place__size_bytes": 9},
        {"created_ns": None},
    ],
)
def test_a_manifest_with_a_right_digest_and_wrong_content_is_refused(changes):
    Manifest.decode(manifest_bytes(), "place")
    with pytest.raises(FormatError, match="place"):
        Manifest.decode(manifest_bytes(**changes), "place")


def with_state(text: bytes) -> bytes:
    """A manifest with a right digest whose small state is this text."""
    body = manifest_bytes(shards__0__state="@here@")
    start, stop = body.index(b'"manifest":') + len(b'"manifest":'), -2
    body = body[start:stop].replace(b'"@here@"', text)
    return b'{"digest":"%s:%s","manifest":%s}\n' % (ALGORITHM.encode(), digest(body).encode(), body)


BOMBS = {
    "lists": lambda count: b"[" + b"[]," * (count // 2) + b"0]",
    "objects": lambda count: b"[" + b"{}," * (count // 2) + b"0]",
    "numbers": lambda count: b"[" + b"0," * count + b"0]",
    "nested": lambda count: b"[" + (b"[" * 300 + b"]" * 300 + b",") * (count // 301) + b"0]",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_more_values_than_any_real_state_has_are_refused_before_they_are_parsed(kind):
    refused = with_state(BOMBS[kind](MAX_VALUES + 1000))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"place: no JSON: .* values, the limit is {MAX_VALUES}"):
            Manifest.decode(refused, "place")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 5 * len(refused)
    Manifest.decode(with_state(BOMBS[kind](10_000)), "place")


@pytest.mark.slow
def test_a_state_with_too_many_values_is_not_written_and_the_error_says_what_to_do():
    meta = CaptureMeta("0" * 16, START, 2, 0, 1, 3, state=[0] * (MAX_VALUES + 1))

    with pytest.raises(FormatError, match="store them as tensors"):
        lone_manifest(meta, 8, Checksums.of(memoryview(b"12345678")), 9).encode()


def test_a_header_with_too_many_values_is_refused_before_it_is_parsed():
    image = shard(b"[" + b"[]," * (MAX_VALUES // 2) + b"0]")

    with pytest.raises(FormatError, match=r"place: .* values, the limit is"):
        Layout.parse(image, len(image), "place")


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_version_says_what_to_do(version):
    with pytest.raises(FormatError, match=f"place: format version {version}, .* use the lazysnap that wrote it"):
        Manifest.decode(manifest_bytes(version=version), "place")


@pytest.mark.parametrize("data", [b"", b"{}", b"\0" * 200, b"null", manifest_bytes()[:-1], manifest_bytes() + b" "])
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(FormatError, match="place"):
        Manifest.decode(data, "place")


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        GOOD[:-1],
        GOOD + "x",
        "x" + GOOD,
        GOOD + ".12",
        GOOD + "\n",
        "." + GOOD,
        GOOD.replace("-0000", "-00000"),
    ],
)
def test_other_directories_are_not_snapshots(name):
    assert SnapshotName.parse(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "rank-0-of-1.json",
        "node-00000-of-00001.json.tmp",
        ".node-00000-of-00001.json",
        "node-00000-of-00001.pt",
        "rank-00000-of-00001.json",
    ],
)
def test_other_files_are_not_shards(name):
    assert parse_file_name(name) is None
