"""Headers and manifests made to mislead a reader."""

import json
import tracemalloc
from dataclasses import replace
from functools import partial

import pytest
from support.names import RUN, START
from support.snapshots import lone_manifest

from lazysnap.errors import FormatError
from lazysnap.shard import layout, limits, manifest
from lazysnap.shard.checksum import ALGORITHM, Checksums, digest
from lazysnap.shard.layout import PAGE, Layout, TensorSpec
from lazysnap.shard.limits import MAX_BLOCK_BYTES, MAX_DIMS, MAX_NAME, MAX_RANKS, MAX_VALUES
from lazysnap.shard.manifest import FORMAT_VERSION, CaptureMeta, Manifest, Shard
from lazysnap.shard.names import NodeName, SnapshotName, parse_file_name

GOOD = "step-00000001-0123456789abcdef-fedcba9876543210"


def shard(entries: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: object = None, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


HEADERS = [
    (b"", "the header claims 0 bytes, the file has 0"),
    (b"\0" * 7, r"the header claims 0 bytes, the file has 7 \(of which 7 read\)"),
    (shard({}, length=1 << 62), f"the header claims {1 << 62} bytes"),
    (shard({}, length=3), "the header claims 3 bytes"),
    (shard(b"{"), "the header is no JSON: "),
    (shard(b"\xff\xfe"), "the header is no JSON: .*utf-8"),
    (shard(b"[" * 100_000), "the header is no JSON: nested more than 3 deep"),
    (shard(b"[[[[[]]]]]"), "the header is no JSON: nested more than 3 deep"),
    (shard(b'{"a":NaN}'), "the header is no JSON: NaN is no JSON"),
    (shard(b"[]"), "the header is no JSON object"),
    (shard({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12), r"tensor 'b' lies at \[4, 12\), expected \[8, 16\)"),
    (shard({"a": entry(0, 8), "b": entry(12, 16)}, b"\0" * 16), r"tensor 'b' lies at \[12, 16\), expected \[8, 12\)"),
    (shard({"a": entry(0, 8)}, b"\0" * 12), "header and tensors take [0-9]+ bytes, the file has"),
    (shard({"a": entry(0, 8)}, b"\0" * 4), "header and tensors take [0-9]+ bytes, the file has"),
    (shard({"a": entry(0, 8, [3])}, b"\0" * 8), r"tensor 'a' lies at \[0, 8\), expected \[0, 12\)"),
    (shard({"a": entry(0, 8, [1 << 61, 1 << 61])}, b"\0" * 8), r"tensor 'a' lies at \[0, 8\)"),
    (shard({"a": entry(0, 8, [-2])}, b"\0" * 8), r"tensor 'a': bad shape \[-2\]"),
    (shard({"a": entry(0, 8, [2.0])}, b"\0" * 8), r"tensor 'a': bad shape \[2.0\]"),
    (shard({"a": entry(0, 8, [True, 2])}, b"\0" * 8), r"tensor 'a': bad shape \[True, 2\]"),
    (shard({"a": entry(0, 8, [2, 1 << 62])}, b"\0" * 8), "tensor 'a': bad shape"),
    (shard({"a": entry(0, 8, {"2": 2})}, b"\0" * 8), "tensor 'a': bad shape"),
    (shard({"a": entry(0, 4, [1] * (MAX_DIMS + 1))}, b"\0" * 4), "tensor 'a': bad shape"),
    (shard({"a": entry(-8, 0)}, b""), r"tensor 'a': bad data_offsets \[-8, 0\]"),
    (shard({"a": {**entry(0, 8), "data_offsets": [0, 8, 8]}}, b"\0" * 8), "tensor 'a': bad data_offsets"),
    (shard({"a": {**entry(0, 8), "data_offsets": {"0": 0, "1": 8}}}, b"\0" * 8), "tensor 'a': bad data_offsets"),
    (shard({"a": entry(0, 8, dtype="OBJECT")}, b"\0" * 8), "tensor 'a': unknown dtype 'OBJECT'"),
    (shard({"a": entry(0, 8, dtype=["F32"])}, b"\0" * 8), r"tensor 'a': unknown dtype \['F32'\]"),
    (shard({"a": {**entry(0, 8), "more": 1}}, b"\0" * 8), "tensor 'a': expected dtype, shape and data_offsets"),
    (shard({"a": None}), "tensor 'a': expected dtype, shape and data_offsets, got None"),
    (shard({"a" * (MAX_NAME + 1): entry(0, 8)}, b"\0" * 8), f"a tensor's name of {MAX_NAME + 1} characters"),
    (shard({"__metadata__": {"a": 1}}), "__metadata__ must map strings to strings"),
    (shard({"__metadata__": []}), "__metadata__ must map strings to strings"),
    (
        shard(
            b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        ),
        "the header is no JSON: a name occurs twice",
    ),
]


@pytest.mark.parametrize(("image", "said"), HEADERS, ids=lambda item: repr(item)[:40])
def test_a_misleading_header_is_refused(image, said):
    with pytest.raises(FormatError, match=f"place: {said}"):
        Layout.parse(image, len(image), "place")


def test_a_header_that_was_not_read_to_its_end_is_refused():
    image = shard({"a": entry(0, 8)}, b"\0" * 8)
    Layout.parse(image, len(image), "place")
    with pytest.raises(FormatError, match=f"the file has {len(image)} \\(of which 20 read\\)"):
        Layout.parse(image[:20], len(image), "place")


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
    ("specs", "said"),
    [
        ([TensorSpec("a", "F32", ())] * 2, "tensor name 'a' is used twice"),
        ([TensorSpec("__metadata__", "F32", ())], "tensor name '__metadata__' is used twice"),
        ([TensorSpec("a", "F31", ())], "tensor 'a': dtype 'F31' is not one of"),
        ([TensorSpec("a" * (MAX_NAME + 1), "F32", ())], f"a name of {MAX_NAME + 1} characters and 0 dimensions"),
        ([TensorSpec("a", "F32", (1,) * (MAX_DIMS + 1))], f"a name of 1 characters and {MAX_DIMS + 1} dimensions"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(specs, said):
    with pytest.raises(FormatError, match=said):
        Layout.plan(specs)


def shard_of(rank: int, offset: int, size_bytes: int) -> Shard:
    return Shard(CaptureMeta(RUN, START, 2, rank, 2, 3, state={"x": 1}), offset, size_bytes, 8)


SHARDS = (shard_of(0, PAGE, 100), shard_of(1, 2 * PAGE, 50))
TWO = Manifest(NodeName(0, 1), SHARDS, Checksums.of(memoryview(bytes(2 * PAGE + 50)), PAGE), 9)
"""Of a file with two shards, two whole blocks and a part of one."""
ONE = lone_manifest(CaptureMeta(RUN, START, 2, 0, 1, 3, state={"x": 1}), 8, Checksums.of(memoryview(b"12345678")), 9)


def manifest_bytes(well_formed: Manifest = ONE, **changes: object) -> bytes:
    """A manifest with some keys replaced (or removed, by ``...``) and a right digest."""
    fields = json.loads(well_formed.encode())["manifest"]
    for name, value in changes.items():
        target = fields
        *parents, last = name.split("__")
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return with_digest(json.dumps(fields).encode())


def decoded(well_formed: Manifest, **changes: object) -> Manifest:
    return Manifest.decode(manifest_bytes(well_formed, **changes), "place")


def with_digest(body: bytes) -> bytes:
    return b'{"digest":"%s:%s","manifest":%s}\n' % (ALGORITHM.encode(), digest(body).encode(), body)


LONG = "x" * (MAX_NAME + 1)
FIELDS = [
    ({"format": "other"}, "not a lazysnap manifest"),
    ({"format": ...}, "not a lazysnap manifest"),
    ({"version": "1"}, "version: Expected `int`, got `str`"),
    ({"version": -1}, "version: Expected `int` >= 0"),
    ({"created_ns": None}, "created_ns: Expected `int`"),
    ({"created_ns": -1}, "created_ns: Expected `int` >= 0"),
    ({"surprise": 1}, r"expected a list of shards and no other keys, got \['surprise'\]"),
    ({"file": None}, "file: Expected `object`"),
    ({"file__surprise": 1}, "file: Object contains unknown field `surprise`"),
    ({"file__name": "x.safetensors"}, "unexpected name of a file 'x.safetensors'"),
    ({"file__name": "../node-00000-of-00001.safetensors"}, "unexpected name of a file '../node"),
    ({"file__name": "node-00000-of-00001"}, "unexpected name of a file 'node-00000-of-00001'"),
    ({"file__name": "\ud800"}, "unexpected name of a file"),
    ({"file__size_bytes": -8}, r"file: .*`\$\.size_bytes`"),
    ({"file__size_bytes": 1 << 63}, r"file: .*`\$\.size_bytes`"),
    ({"file__size_bytes": 1 << 40}, f"the number of block checksums does not fit {1 << 40} bytes"),
    ({"file__size_bytes": 9}, "the shards end at byte 8, the file has 9"),
    ({"file__checksum__algorithm": "none"}, r"file: .*`\$\.checksum\.algorithm`"),
    ({"file__checksum__block_bytes": 0}, r"file: .*`\$\.checksum\.block_bytes`"),
    ({"file__checksum__block_bytes": MAX_BLOCK_BYTES + 1}, r"file: .*`\$\.checksum\.block_bytes`"),
    ({"file__checksum__blocks": []}, "the number of block checksums does not fit 8 bytes"),
    ({"file__checksum__blocks": ["0" * 32] * 2}, "the number of block checksums does not fit 8 bytes"),
    ({"file__checksum__blocks": ["x" * 32]}, r"file: .*`\$\.checksum\.blocks\[0\]`"),
    ({"file__checksum__blocks": ["0" * 32]}, "the checksum over the block checksums does not agree"),
    ({"file__checksum__whole": "0" * 32}, "the checksum over the block checksums does not agree"),
    ({"file__checksum__whole": "0" * 31}, r"file: .*`\$\.checksum\.whole`"),
    ({"shards": None}, "expected a list of shards"),
    ({"shards": {"0": {}}}, "expected a list of shards"),
    ({"shards": []}, "expected a list of shards"),
    ({"shards": [None]}, "a shard must be an object, got None"),
    ({"shards__0__run_id": "../../etc/passwd"}, r"`\$\.run_id`"),
    ({"shards__0__run_id": "0" * 15}, r"`\$\.run_id`"),
    ({"shards__0__step": "\ud800"}, "'utf-8' codec can't encode"),
    ({"shards__0__start": "x"}, r"`\$\.start`"),
    ({"shards__0__step": -1}, r"`\$\.step`"),
    ({"shards__0__step": 1.0}, r"`\$\.step`"),
    ({"shards__0__step": True}, r"`\$\.step`"),
    ({"shards__0__step": 1 << 63}, r"`\$\.step`"),
    ({"shards__0__rank": -1}, r"`\$\.rank`"),
    ({"shards__0__rank": 1}, "rank 1 of 1"),
    ({"shards__0__world_size": 0}, r"`\$\.world_size`"),
    ({"shards__0__world_size": MAX_RANKS + 1}, r"`\$\.world_size`"),
    ({"shards__0__captured_ns": -1}, r"`\$\.captured_ns`"),
    ({"shards__0__tensors": None}, r"`\$\.tensors`"),
    ({"shards__0__tensors": {"a": None}}, r"`\$\.tensors\[\.\.\.\]`"),
    ({"shards__0__tensors": {LONG: {}}}, r"`key` in `\$\.tensors`"),
    ({"shards__0__tensors": {"a": {"surprise": 1}}}, "tensor 'a': .*surprise"),
    ({"shards__0__tensors": {"a": {"dtype": LONG}}}, "tensor 'a': "),
    ({"shards__0__tensors": {"a": {"order": [0] * (MAX_DIMS + 1)}}}, "tensor 'a': "),
    ({"shards__0__aliases": []}, r"`\$\.aliases`"),
    ({"shards__0__aliases": {"a": 1}}, r"`\$\.aliases\[\.\.\.\]`"),
    ({"shards__0__aliases": {"a": LONG}}, r"`\$\.aliases\[\.\.\.\]`"),
    ({"shards__0__packages": {"torch": None}}, r"`\$\.packages\[\.\.\.\]`"),
    ({"shards__0__packages": {LONG: "1"}}, r"`key` in `\$\.packages`"),
    ({"shards__0__parameters": {"optimizer": [1]}}, r"`\$\.parameters"),
    ({"shards__0__replicas": [-1]}, r"`\$\.replicas\[0\]`"),
    ({"shards__0__state": ...}, r"keys missing or unknown: \['state'\]"),
    ({"shards__0__surprise": 1}, r"keys missing or unknown: \['surprise'\]"),
    ({"shards__0__frozen": {"digest": "0" * 32}}, r"keys missing or unknown: \['frozen'\]"),
    ({"shards__0__place": None}, "place: Expected `object`"),
    ({"shards__0__place__surprise": 1}, "place: Object contains unknown field `surprise`"),
    ({"shards__0__place__offset": -1}, r"place: .*`\$\.offset`"),
    ({"shards__0__place__header_bytes": 7}, "a header of 7 bytes in 8"),
    ({"shards__0__place__header_bytes": 9}, "a header of 9 bytes in 8"),
    ({"shards__0__place__offset": PAGE}, f"the only shard begins at byte {PAGE}"),
    ({"shards__0__place__size_bytes": 9}, "the shards end at byte 9, the file has 8"),
]
FIELDS_OF_TWO = [
    ({"shards__1__run_id": "1" * 16}, "shards of different snapshots: .*step-00000002-1{16}-1{16}"),
    ({"shards__1__start": "2" * 16}, "shards of different snapshots: .*step-00000002-0{16}-2{16}"),
    ({"shards__1__step": 3}, "shards of different snapshots: .*step-00000003"),
    ({"shards__1__world_size": 3}, "shards of different snapshots: .*of 3 ranks"),
    ({"shards__1__rank": 0}, "several shards of one rank"),
    ({"shards__1__place__offset": PAGE}, f"the shard of rank 1 begins at byte {PAGE}"),
    ({"shards__1__place__offset": 2 * PAGE + 1}, f"the shard of rank 1 begins at byte {2 * PAGE + 1}"),
    ({"shards__1__place__size_bytes": 49}, f"the shards end at byte {2 * PAGE + 49}, the file has {2 * PAGE + 50}"),
    ({"file__base": [[0, 3]]}, "base: blocks 0 to 3 of 3"),
    ({"file__base": [[1, 1]]}, "base: blocks 1 to 1 of 3"),
    ({"file__base": [[1, 0]]}, "base: blocks 1 to 0 of 3"),
    ({"file__base": [[1, 2], [0, 1]]}, "base: blocks 0 to 1 of 3"),
    ({"file__base": [[0, -1]]}, r"file: .*`\$\.base"),
    ({"file__base": [[0, 1, 2]]}, r"file: .*`\$\.base"),
]


@pytest.mark.parametrize(
    ("well_formed", "changes", "said"),
    [
        *((ONE, changes, said) for changes, said in FIELDS),
        *((TWO, changes, said) for changes, said in FIELDS_OF_TWO),
    ],
    ids=lambda item: repr(item)[:60] if isinstance(item, dict) else "",
)
def test_a_manifest_with_a_right_digest_and_wrong_content_is_refused(well_formed, changes, said):
    assert decoded(well_formed) == well_formed
    with pytest.raises(FormatError, match=f"^place: (.* - at )?{said}"):
        decoded(well_formed, **changes)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON: "),
        (b"{", "no JSON: "),
        (b"\xff", "no JSON: "),
        (b"[]", "expected a JSON object, got list"),
        (b'{"a":Infinity}', "no JSON: Infinity is no JSON"),
        (b"[" * 400 + b"]" * 400, "no JSON: nested more than 312 deep"),
        (b"[" * 100_000, "no JSON: nested more than 312 deep"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body, said):
    with pytest.raises(FormatError, match=f"place: {said}"):
        Manifest.decode(with_digest(body), "place")


def parsed(image: bytes) -> Layout:
    return Layout.parse(image, len(image), "place")


LARGE_HEADER = shard({"a": entry(0, 8), "b": entry(8, 12)}, b"\0" * 12)
PLAN = partial(Layout.plan, [TensorSpec("a", "F32", ()), TensorSpec("b", "F32", ())])


@pytest.mark.parametrize(
    ("module", "limit", "value", "attempt", "said"),
    [
        (limits, "MAX_VALUES", 5, partial(parsed, LARGE_HEADER), "no JSON: [0-9]+ values, the limit is 5"),
        (limits, "MAX_VALUES", 5, ONE.encode, "a manifest of [0-9]+ values, the limit is 5: keep large plain values"),
        (layout, "MAX_HEADER_BYTES", 20, partial(parsed, LARGE_HEADER), "the header claims [0-9]+ bytes"),
        (layout, "MAX_HEADER_BYTES", 20, PLAN, "2 tensors with a header of 4088 bytes in one shard"),
        (layout, "MAX_TENSORS", 1, partial(parsed, LARGE_HEADER), "2 tensors, the limit is 1"),
        (layout, "MAX_TENSORS", 1, PLAN, "2 tensors with a header of 4088 bytes in one shard"),
        (manifest, "MAX_TENSORS", 1, partial(decoded, ONE, shards__0__aliases={"a": "b", "c": "b"}), "2 tensors and"),
        (
            manifest,
            "MAX_TENSORS",
            1,
            partial(decoded, ONE, shards__0__aliases={"a": "b"}, shards__0__tensors={"b": {}}),
            "2 tensors and further names, the limit is 1",
        ),
        (manifest, "MAX_RANKS", 1, partial(decoded, TWO), "expected a list of shards"),
        (manifest, "MAX_HEADER_BYTES", -1, partial(decoded, TWO), "a header of 8 bytes in 100"),
        (manifest, "MAX_MANIFEST_BYTES", 100, ONE.encode, "a manifest of [0-9]+ bytes; the limit is 100: keep large"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_what_exceeds_a_limit_is_refused(monkeypatch, module, limit, value, attempt, said):
    attempt()
    monkeypatch.setattr(module, limit, value)
    with pytest.raises(FormatError, match=said):
        attempt()


def test_a_number_that_is_not_finite_is_not_written():
    meta = replace(ONE.meta, state={"x": float("inf")})
    with pytest.raises(FormatError, match="the metadata is no JSON: Out of range float values"):
        meta.to_bytes()


def test_a_rank_that_a_file_does_not_hold_is_named():
    with pytest.raises(FormatError, match=r"node-00000-of-00001\.safetensors: holds no shard of rank 2"):
        TWO.of(2)
    assert TWO.of(1) is TWO.shards[1]


def with_state(text: bytes) -> bytes:
    """A manifest with a right digest whose small state is this text."""
    body = manifest_bytes(shards__0__state="@here@")
    start, stop = body.index(b'"manifest":') + len(b'"manifest":'), -2
    return with_digest(body[start:stop].replace(b'"@here@"', text))


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


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"{}", "2 bytes that begin with b'{}', not with"),
        (b"\0" * 200, "200 bytes that begin with"),
        (manifest_bytes()[:-1], "of its body is [0-9a-f]{32}, it says [0-9a-f]{32}"),
        (manifest_bytes() + b" ", "of its body is [0-9a-f]{32}, it says [0-9a-f]{32}"),
        (manifest_bytes()[:-2] + b" \n", "do not end with the closing brace and a line's end"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data, said):
    with pytest.raises(FormatError, match=f"place: the manifest is damaged: .*{said}"):
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
        GOOD.replace("00000001", str(1 << 63)),
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
        "node-00001-of-00001.json",
        "node-000000-of-000001.json",
        "node-00000-of-1048577.json",
    ],
)
def test_other_files_are_not_shards(name):
    assert parse_file_name(name) is None
