"""A reader of snapshots, written from docs/format.md alone: it uses nothing of lazysnap and nothing of torch.

    python tests/format_reader.py LEVEL

Local directories only. Tensors are numpy arrays; bfloat16, 8-bit floats and logical dtypes that numpy does not know
stay as raw numbers of their size.
"""

import base64
import json
import re
import sys
from pathlib import Path

import numpy as np
import xxhash

STEP = re.compile(r"step-(\d{8,})-([0-9a-f]{16})-([0-9a-f]{16})")
FILE = re.compile(r"node-(\d{5,})-of-(\d{5,})\.json")
DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"}
DTYPES |= {"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?", "C64": "c8"}
DTYPES |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), "u1")
FORM = re.compile(rb'\{"digest":"xxh3-128:([0-9a-f]{32})","manifest":(.*)\}\n', re.DOTALL)


def manifest_of(path: Path) -> dict:
    found = FORM.fullmatch(path.read_bytes())
    assert found, f"{path}: not the form of a manifest"
    digest, body = found.groups()
    assert xxhash.xxh3_128_hexdigest(body) == digest.decode(), f"{path}: its digest differs"
    manifest = json.loads(body.decode("utf-8", "surrogatepass"))
    assert (manifest["format"], manifest["version"]) == ("lazysnap", 1)
    return manifest


def shards_of(path: Path, manifest: dict) -> list[tuple[dict, dict[str, np.ndarray]]]:
    """Facts and tensors of the shards in one file, each block compared with its checksum."""
    facts = manifest["file"]
    size = facts["checksum"]["block_bytes"]
    data = whole_file(path.parent / facts["name"], facts.get("base", []), size)
    blocks = [xxhash.xxh3_128_hexdigest(data[at : at + size]) for at in range(0, len(data), size)]
    assert len(data) == facts["size_bytes"], f"{path}: another size"
    assert blocks == facts["checksum"]["blocks"], f"{path}: another block"
    places = [shard["place"] for shard in manifest["shards"]]
    parts = [data[place["offset"] : place["offset"] + place["size_bytes"]] for place in places]
    return [(shard, tensors_of(shard, part)) for shard, part in zip(manifest["shards"], parts, strict=True)]


def whole_file(path: Path, base: list[list[int]], size: int) -> bytes:
    """The bytes of a file; of the blocks in ``base`` those of the object beside it."""
    rest = path.read_bytes()
    if not base:
        return rest
    shared = path.with_suffix(".base").read_bytes()
    data = b""
    for first, behind_last in base:
        count = first * size - len(data)
        data, rest = data + rest[:count], rest[count:]
        count = (behind_last - first) * size
        data, shared = data + shared[:count], shared[count:]
    assert not shared, f"{path}: a base of another size"
    return data + rest


def tensors_of(shard: dict, data: bytes) -> dict[str, np.ndarray]:
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start].decode("utf-8", "surrogatepass")).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            array = np.frombuffer(data[start + begin : start + end], np.dtype(DTYPES[entry["dtype"]]).newbyteorder("<"))
            logical = shard["tensors"].get(name, {}).get("dtype")
            array = array.reshape(entry["shape"])
            tensors[name] = array.view("<c16")[..., 0] if logical == "complex128" else array
    return tensors


class Snapshot:
    """One complete snapshot."""

    def __init__(self, files: list[tuple[Path, dict]]) -> None:
        found = {shard["rank"]: (shard, tensors) for file in files for shard, tensors in shards_of(*file)}
        self.shards = [found[rank] for rank in sorted(found)]

    def tensor(self, name: str, rank: int = 0) -> np.ndarray:
        """Of one rank: its own tensor, or the whole of which ranks hold boxes."""
        order = [rank, *(other for other in range(len(self.shards)) if other != rank)]
        whole = None
        for other in order:
            shard, tensors = self.shards[other]
            stored = shard["aliases"].get(name, name)
            facts = shard["tensors"].get(stored, {})
            if stored not in tensors or (other != rank and "scope" not in facts):
                continue
            if "scope" not in facts:
                return tensors[stored]
            whole = np.zeros(facts["global_shape"], tensors[stored].dtype) if whole is None else whole
            box = zip(facts["offsets"], tensors[stored].shape, strict=True)
            whole[tuple(slice(at, at + size) for at, size in box)] = tensors[stored]
        assert whole is not None, f"no shard has {name}"
        return whole

    def state(self, rank: int = 0) -> object:
        """The training state of one rank."""
        return self._decoded(self.shards[rank][0]["state"], rank)

    def _decoded(self, value: object, rank: int) -> object:
        if isinstance(value, list):
            return [self._decoded(item, rank) for item in value]
        if not isinstance(value, dict):
            return value
        kind = value.get("$")
        if kind is None:
            return {key: self._decoded(item, rank) for key, item in value.items()}
        if kind == "tensor":
            return self.tensor(value["v"], rank)
        if kind == "array":
            tensor = self._decoded(value["v"], rank)
            return np.frombuffer(tensor.tobytes(), value["dtype"]).reshape(value["shape"])
        if kind in ("tuple", "torch.Size"):
            return tuple(self._decoded(item, rank) for item in value["v"])
        if kind in ("dict", "OrderedDict", "defaultdict", "Counter"):
            return {self._decoded(key, rank): self._decoded(item, rank) for key, item in value["v"]}
        if kind in ("int", "float"):
            return {"int": int, "float": float}[kind](value["v"])
        if kind == "bytes":
            return base64.b64decode(value["v"])
        return value  # the other kinds of the page: left as they stand


def newest(level: Path) -> Snapshot | None:
    """The newest complete snapshot: of the greatest run, then step, then start."""
    keys = []
    for directory in level.iterdir():
        if found := STEP.fullmatch(directory.name):
            keys.append((found[2], int(found[1]), found[3], directory))
    for *_, directory in sorted(keys, reverse=True):
        files = [(path, manifest_of(path)) for path in sorted(directory.iterdir()) if FILE.fullmatch(path.name)]
        shards = [shard for _, manifest in files for shard in manifest["shards"]]
        if shards and {shard["rank"] for shard in shards} == set(range(shards[0]["world_size"])):
            return Snapshot(files)
    return None


if __name__ == "__main__":
    print(newest(Path(sys.argv[1])).state())
