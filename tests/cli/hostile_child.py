"""Changes a level in seeded ways that its files allow, and lets every reader look, with little memory to take.

Arguments: a directory to work in, the seed, how many changes. Prints one line of JSON for each reader that misbehaves,
and at the end the number of changes.
"""

import contextlib
import copy
import io
import json
import logging
import os
import random
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cli_level import RUN, at, put

import lazysnap
from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.cli import main
from lazysnap.errors import LazySnapError
from lazysnap.shard.checksum import ALGORITHM, Checksums, digest

ROOM_BYTES = 1 << 30
READER_S = 180.0
NESTED = "@nested@"
NUMBERS = [-1, 0, 1, 2, 7, 1 << 20, (1 << 20) + 1, 9_999_999_999, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 10**400]
VALUES: list[Any] = [
    *NUMBERS, 0.5, float("nan"), float("inf"), True, None, "", "x", "x" * 100_000, "\ud800", "\0\x1b[2J",
    "../../x", "$",
    [], {}, [[]], {"a": {}}, [0] * 100_000, [[]] * 1000, {"$": "tensor"}, {"$": []}, {"$": "tuple", "v": 7},
    {"$": "dict", "v": [[[], 1]]}, {"$": "range", "v": [0, 1 << 62, 1]}, {"$": "int", "v": "9" * 10_000},
    {"$": "ndarray", "dtype": "<f8", "shape": [1 << 40], "v": ""},
    {"$": "ndarray", "dtype": "V9999999", "shape": [0], "v": ""},
    {"$": "npscalar", "dtype": "O", "shape": [], "v": "AAAA"}, {"$": "timedelta", "v": [1 << 62, 0, 0]},
    {"$": "torch.device", "v": "cuda:99"}, {"$": "torch.dtype", "v": "load"}, {"$": "registered", "n": "x", "v": {}},
    {"$": "deque", "v": [], "maxlen": -1}, {"$": "defaultdict", "v": [], "factory": "exec"}, NESTED,
]  # fmt: skip
NAMES = [
    "node-00000-of-9999999999", "node-9999999999-of-9999999999", "node-00000-of-1048577", "node-00001-of-00001",
    "node-00000-of-00000", "rank-0-of-1", "rank-\u0660\u0660\u0660\u0660\u0660-of-00001", "node-00000-of-9999999",
    "x\ud800",
]  # fmt: skip
DIRECTORIES = [
    *(f"step-{step}-{RUN}-{RUN}" for step in ("9" * 20, 1 << 63, (1 << 63) - 1, "9" * 200, "00000000001")),
    f"step-{chr(0x661) * 8}-{RUN}-{RUN}",
    "step-00000001.x", "step-",
]  # fmt: skip


def make(root: Path) -> None:
    """Two whole snapshots, one with a name, and half of one of two ranks."""
    state = {"model": {"base": torch.ones(3000), "w": torch.ones(50)}, "odd": {"t": (1, {2: [3]}), "s": {1, 2}}}
    put(str(root), 10, state, names=("best",))
    put(str(root), 20)
    put(str(root), 30, rank=(0, 2))


def with_digest(fields: Any, depth: int) -> bytes:
    body = json.dumps(fields).replace(json.dumps(NESTED), "[" * depth + "]" * depth).encode()
    return b'{"digest":"%s:%s","manifest":%s}\n' % (ALGORITHM.encode(), digest(body).encode(), body)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value[:3]):
            yield from paths_in(item, (*path, key))


class Changes:
    """One change of a level."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng = root, rng

    def manifests(self) -> list[Path]:
        return sorted(self.root.rglob("*.json"))

    def fields(self) -> None:
        """Replace, remove or add values in a manifest whose digest is right."""
        path = self.rng.choice(self.manifests())
        fields = json.loads(path.read_bytes())["manifest"]
        for _ in range(self.rng.choice([1, 1, 2, 5])):
            chosen = self.rng.choice([item for item in paths_in(fields) if item])
            target = fields
            for key in chosen[:-1]:
                target = target[key]
            what = self.rng.random()
            if what < 0.15:
                del target[chosen[-1]]
            elif what < 0.3 and isinstance(target, dict):
                target["@more"] = copy.deepcopy(self.rng.choice(VALUES))
            else:
                target[chosen[-1]] = copy.deepcopy(self.rng.choice(NUMBERS if what < 0.6 else VALUES))
        path.write_bytes(with_digest(fields, self.rng.choice([50, 290, 305, 900, 100_000])))

    def ranks(self) -> None:
        """Claim many ranks, in the names, too."""
        path = self.rng.choice(self.manifests())
        fields = json.loads(path.read_bytes())["manifest"]
        world = self.rng.choice([number for number in NUMBERS if number > 0])
        rank = self.rng.choice([0, 1, world // 2, world - 1])
        fields["shards"][0] |= {"rank": rank, "world_size": world}
        self._move(path, fields, f"node-{rank:05d}-of-{world:05d}"[:200])

    def _move(self, path: Path, fields: dict[str, Any], stem: str) -> None:
        fields["file"]["name"] = f"{stem}.safetensors"
        path.with_suffix(".safetensors").rename(path.with_name(f"{stem}.safetensors"))
        path.unlink()
        path.with_name(f"{stem}.json").write_bytes(with_digest(fields, 1))

    def header(self) -> None:
        """Another header, under right checksums."""
        path = self.rng.choice(self.manifests())
        shard = path.with_suffix(".safetensors")
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        chosen = self.rng.choice([item for item in paths_in(entries) if item] or [("x",)])
        target = entries
        for key in chosen[:-1]:
            target = target[key]
        target[chosen[-1]] = self.rng.choice(VALUES)
        depth = self.rng.choice([2, 50, 900, 100_000])
        text = json.dumps(entries).replace(json.dumps(NESTED), "[" * depth + "]" * depth).encode()
        claimed = self.rng.choice([len(text), len(text), 1 << 60, 0])
        new = claimed.to_bytes(8, "little") + text + data[8 + length :]
        shard.write_bytes(new)
        fields = json.loads(path.read_bytes())["manifest"]
        checksums = Checksums.of(memoryview(new), self.rng.choice([16 << 20, 4096, 1 << 40]))
        sums = {"block_bytes": checksums.block_bytes, "blocks": list(checksums.blocks), "whole": checksums.whole}
        fields["shards"][0]["place"] |= {"size_bytes": len(new), "header_bytes": min(8 + claimed, len(new))}
        fields["file"] |= {"size_bytes": len(new), "checksum": {**fields["file"]["checksum"], **sums}}
        path.write_bytes(with_digest(fields, 1))

    def data(self) -> None:
        """Flip, cut or grow any file."""
        path = self.rng.choice(sorted(path for path in self.root.rglob("*") if path.is_file()))
        data = bytearray(path.read_bytes())
        what = self.rng.random()
        if what < 0.5 and data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        elif what < 0.8:
            del data[self.rng.randrange(len(data) + 1) :]
        path.write_bytes(data)
        if what >= 0.8:
            os.truncate(path, self.rng.choice([1 << 29, 1 << 40]))  # a hole, and no space

    def names(self) -> None:
        """Other names of files and directories."""
        if self.rng.random() < 0.4:
            path = self.rng.choice(sorted(path for path in self.root.iterdir() if path.is_dir()))
            shutil.copytree(path, path.with_name(self.rng.choice(DIRECTORIES)), dirs_exist_ok=True)
            return
        path = self.rng.choice(self.manifests())
        stem = os.fsencode(path.parent) + b"/" + self.rng.choice(NAMES).encode("utf-8", "surrogatepass")
        for suffix in (".json", ".safetensors"):
            shutil.copy(path.with_suffix(suffix), stem + suffix.encode())

    def kinds(self) -> None:
        """Something else where a file or directory should be."""
        path = self.rng.choice(sorted(self.root.rglob("*")))
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        what = self.rng.randrange(4)
        if what == 0:
            os.mkfifo(path)
        elif what == 1:
            path.symlink_to(path.name)
        elif what == 2:
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")

    def keep_files(self) -> None:
        """Names with any content."""
        path = self.root / at(20) / self.rng.choice(["keep-a", "keep-" + "n" * 64, "keep-\n", "keep-" + "n" * 65])
        path.write_bytes(self.rng.choice([b"", RUN.encode(), b"\xff" * 100, b"years of work", bytes(100_000)]))


class Readers:
    """Everybody who looks at a level; each says what it did wrong."""

    def __init__(self, root: Path, scratch: Path, engine: SnapshotEngine) -> None:
        self.root, self.scratch, self.engine = str(root), scratch, engine

    def command(self, *words: str) -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
        said = out.getvalue() + err.getvalue()
        if code not in (0, 1, 2) or "a bug in lazysnap" in said or "Traceback" in said:
            return f"code {code}: {said[-600:]}"
        return ""

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        url, copies = self.root, str(self.scratch / "copies")
        yield "ls", lambda: self.command("ls", url)
        yield "ls --json", lambda: self.command("ls", url, "--json")
        yield "verify", lambda: self.command("verify", url)
        yield "show", lambda: self.command("show", url, "latest")
        yield "show 10", lambda: self.command("show", url, "10", "--json", "--all")
        yield "prune", lambda: self.command("prune", url, "--keep-last", "1")
        yield "copy", lambda: self.command("copy", url, copies)
        for name in ("w.safetensors", "o.ckpt", "o"):
            to = self.scratch / name
            if to.is_dir():  # of the call before
                shutil.rmtree(to)
            to.unlink(missing_ok=True)
            yield f"export {name}", lambda to=str(to): self.command("export", url, "latest", "--to", to)
        for which in ("latest", "best", 10, f"run:{RUN[:8]}", f"run:{RUN}@10"):
            yield (
                f"load_weights {which}",
                lambda which=which: self.raises(lambda: lazysnap.load_weights(self.root, which)),
            )
        yield "restart", lambda: self.raises(lambda: self.engine._fetch("latest"))
        yield "restart by name", lambda: self.raises(lambda: self.engine._fetch("best"))

    def raises(self, work: Callable[[], object]) -> str:
        with contextlib.suppress(LazySnapError):
            work()
        return ""


def run(place: Path, seed: int, count: int) -> None:
    good, root, scratch = place / "good", place / "level", place / "scratch"
    make(good)
    config = SnapshotConfig(
        levels=(PersistentLevel(str(root)),), job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=1)
    )
    engine = SnapshotEngine(config, {"model": torch.nn.Linear(2, 2)})
    engine._wait_ready(60)
    shutil.copytree(good, root)
    for name, reader in Readers(root, scratch, engine).all():
        scratch.mkdir(exist_ok=True)
        assert not reader(), name
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    logging.disable()
    try:
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            for directory in (root, scratch):
                shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(good, root)
            scratch.mkdir()
            changes = Changes(root, rng)
            kinds = [changes.fields] * 4 + [
                changes.ranks,
                changes.ranks,
                changes.header,
                changes.header,
            ]
            kind = rng.choice([*kinds, changes.data, changes.names, changes.kinds, changes.keep_files])
            kind()
            for name, reader in Readers(root, scratch, engine).all():
                started = time.monotonic()
                try:
                    wrong = reader()
                except BaseException as error:  # noqa: BLE001  told
                    wrong = f"{type(error).__name__}: {error!s:.300}"
                if time.monotonic() - started > READER_S:
                    wrong += f" after {time.monotonic() - started:.0f} s"
                if wrong:
                    fact = {"seed": seed, "number": number, "change": kind.__name__, "reader": name, "wrong": wrong}
                    print(json.dumps(fact), flush=True)
    finally:
        engine.close(drain=False)
    print(json.dumps({"changes": count}), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
