"""A file that claims too much costs one line and an exit code: no crash, no memory, no endless work."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import pytest
from cli_level import MANIFEST, SHARD, at, change, files, put, run, run_json
from support.catalogue import inventory_of
from support.stored import newest_directory

from lazysnap.levels.store import open_storage
from lazysnap.shard.checksum import ALGORITHM, digest
from lazysnap.shard.limits import MAX_RANKS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SEED = 1
CHANGES = 40
COMMANDS = [
    ["ls"],
    ["verify"],
    ["show", "latest"],
    ["show", "10"],
    ["prune"],
    ["export", "10", "--to", "o.ckpt"],
]


@pytest.mark.timeout(900)
def test_no_change_of_any_file_crashes_a_reader_or_takes_its_memory():
    """The same changes in every run."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, str(HERE / "hostile_child.py"), place, str(SEED), str(CHANGES)],
            capture_output=True,
            text=True,
            timeout=840,
            check=False,
        )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [{"changes": CHANGES}], done.stderr[-2000:]


def claim(url: str, **claims: object) -> None:
    """Let the manifest of step 10 say so, under a right digest."""

    def how(data: bytearray) -> None:
        fields = json.loads(data)["manifest"]
        for name, value in claims.items():
            *parents, last = name.split("__")
            target = fields
            for parent in parents:
                target = target[int(parent) if parent.isdigit() else parent]
            target[last] = value
        body = json.dumps(fields).encode()
        data[:] = b'{"digest":"%s:%s","manifest":%s}\n' % (ALGORITHM.encode(), digest(body).encode(), body)

    change(url, f"{at(10)}/{MANIFEST}", how)


@pytest.mark.parametrize("ranks", [2, MAX_RANKS, MAX_RANKS + 1, 9_999_999_999])
def test_a_claim_of_many_ranks_makes_a_snapshot_incomplete_and_nothing_more(make_url, ranks, capsys):
    url = make_url("local")
    put(url, 10)
    stem = f"node-00000-of-{ranks:05d}"
    claim(url, shards__0__world_size=ranks, file__name=f"{stem}.safetensors")
    directory = Path(url) / at(10)
    (directory / SHARD).rename(directory / f"{stem}.safetensors")
    (directory / MANIFEST).rename(directory / f"{stem}.json")

    assert newest_directory(url) is None
    assert run("show", url, "latest") == 2
    assert run("copy", url, make_url("local")) == 2
    code, listed = run_json(capsys, "ls", url)
    assert code == 0
    if ranks > MAX_RANKS:
        assert [item["ranks"] for item in listed["snapshots"]] == [0]  # not even a name of ours
    else:
        assert [(item["ranks"], item["world_size"]) for item in listed["snapshots"]] == [(1, ranks)]
    put(url, 20)
    assert newest_directory(url).endswith(at(20))
    assert run("copy", url, make_url("local")) == 0


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"file__checksum__block_bytes": 1 << 40}, "$.checksum.block_bytes"),
        ({"shards__0__place__header_bytes": 1 << 62}, "a header of"),
        ({"file__size_bytes": 1 << 62}, "does not fit"),
        ({"shards__0__step": 1 << 63}, "$.step"),
        ({"shards__0__tensors": {"w": {"offsets": [0] * 65}}}, "tensor 'w': expected"),
        ({"shards__0__packages": {"x" * 5000: "1"}}, "length <= 4096"),
        ({"shards__0__run_id": "\ud800"}, "$.run_id"),
        ({"file__checksum__algorithm": "\ud800"}, "surrogates not allowed"),
        ({"shards__0__state": {"loss": float("nan")}}, "NaN is no JSON"),
        ({"shards__0__state": json.loads("[" * 313 + "]" * 313)}, "nested more than 312 deep"),
    ],
    ids=str,
)
def test_a_claim_beyond_the_limits_is_one_line(make_url, monkeypatch, tmp_path, capsys, claims, expected):
    monkeypatch.chdir(tmp_path)
    url = make_url("local")
    put(url, 10)
    claim(url, **claims)
    for words in COMMANDS:
        code = run(words[0], url, *words[1:])
        said = "".join(capsys.readouterr())
        assert code in (0, 1, 2), words
        assert expected in said.replace("\n", " "), words
        assert "not foreseen" not in said
    assert f"{at(10)}/{SHARD}" in files(url)


def test_a_state_at_the_limit_is_shown_and_exported(make_url, tmp_path):
    url = make_url("local")
    put(url, 10)
    claim(url, shards__0__state=json.loads('{"a":' * 100 + "[" * 200 + "]" * 200 + "}" * 100))
    assert inventory_of(open_storage(url)).problems == ()
    assert run("show", url, "10") == 0
    assert run("show", url, "10", "--json") == 0


def test_what_nobody_foresaw_is_one_line_too(make_url, capsys, monkeypatch):
    """Drivers of others may raise, and return, anything."""
    url = make_url("memory")
    put(url, 10)
    driver = fsspec.get_filesystem_class("memory")
    for answer, expected in ((RecursionError("driver"), "RecursionError: driver"), (None, "TypeError")):

        def ls(*_: object, answer: object = answer, **__: object) -> object:
            if answer is not None:
                raise answer
            return answer

        with monkeypatch.context() as broken:
            broken.setattr(driver, "ls", ls)
            assert run("ls", url) == 2
        said = capsys.readouterr().err
        assert expected in said
        assert "Traceback" not in said
