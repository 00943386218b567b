"""Promises of ``lazysnap export`` about plain states: others read back what was captured, bit for bit."""

import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from cli_level import RUN, SHARD, at, change, files, flip, put, run, run_json
from fsspec.implementations.memory import MemoryFileSystem
from rich.progress import Progress
from torch import nn

import lazysnap
from lazysnap.errors import ConfigError
from lazysnap.exports import target
from lazysnap.exports.named import Named, name_snapshot
from lazysnap.exports.process import main as export_process
from lazysnap.state.objects import ObjectState

pytestmark = pytest.mark.slow

FORMATS = ["out.safetensors", "out.ckpt", "out"]


class Tied(nn.Module):
    """Like a language model: the head is the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.head = nn.Linear(8, 10, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2, dtype=torch.bfloat16))


def trained(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    objects = {"model": model, "optimizer": optimizer, "progress": {"epoch": 3, "best": float("inf")}}
    return ObjectState(objects).collect()


def stock_dcp_load(into: dict[str, Any], path: Path) -> None:
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(into, checkpoint_id=path)


def equal(one: Any, other: Any) -> bool:
    """Same types, same bits."""
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        bits = [item.detach().contiguous().reshape(-1).view(torch.uint8) for item in (one, other)]
        return torch.equal(*bits)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def test_weights_are_loaded_by_safetensors_into_the_model(url, tmp_path, capsys):
    model = plain_model()
    put(url, 10, trained(model))
    file = tmp_path / "model.safetensors"

    code, result = run_json(capsys, "export", url, "latest", "--to", file)

    assert code == 0
    assert result["size_bytes"] == file.stat().st_size
    loaded = safetensors.torch.load_file(file)
    assert equal(dict(sorted(loaded.items())), dict(sorted(model.state_dict().items())))
    fresh = plain_model()
    fresh.load_state_dict(loaded)
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_tied_weights_are_as_save_model_would_have_them(url, tmp_path, capsys):
    model = Tied()
    put(url, 10, trained(model))
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    assert run("export", url, "latest", "--to", ours) == 0
    assert "load_model" in capsys.readouterr().err
    safetensors.torch.save_model(model, str(theirs))

    with safetensors.safe_open(ours, "pt") as one, safetensors.safe_open(theirs, "pt") as other:
        assert sorted(one.keys()) == sorted(other.keys())
        assert one.metadata() == {"format": "pt", **other.metadata()}
    fresh = Tied()
    assert safetensors.torch.load_model(fresh, ours) == (set(), [])
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))
    assert fresh.head.weight is fresh.embedding.weight


def test_tensors_larger_than_a_block_arrive(make_url, tmp_path):
    url = make_url("local")
    torch.manual_seed(1)
    state = {"model": {"big": torch.rand(5_000_000), "odd": torch.rand(3, 7), "byte": torch.arange(9).to(torch.uint8)}}
    put(url, 10, state)
    assert run("export", url, "10", "--to", tmp_path / "w.safetensors") == 0
    assert equal(
        dict(sorted(safetensors.torch.load_file(tmp_path / "w.safetensors").items())),
        dict(sorted(state["model"].items())),
    )


def test_every_dtype_that_safetensors_has_arrives(make_url, tmp_path):
    url = make_url("local")
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]  # fmt: skip
    weights = {str(dtype): torch.tensor([0, 1, 1, 0, 1]).to(dtype) for dtype in dtypes}
    weights["empty"] = torch.empty(0, 3)
    weights["scalar"] = torch.tensor(2.5)
    put(url, 10, {"model": weights})
    assert run("export", url, "10", "--to", tmp_path / "w.safetensors") == 0
    loaded = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert {name for name in weights if not equal(weights[name], loaded[name])} == set()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz])
def test_dtypes_that_safetensors_has_not_are_refused_by_name_and_fit_elsewhere(make_url, tmp_path, capsys, dtype):
    url = make_url("local")
    state = {"model": {"strange": torch.ones(4).to(dtype), "w": torch.ones(2)}}
    put(url, 10, state)
    code, result = run_json(capsys, "export", url, "10", "--to", tmp_path / "w.safetensors")
    assert code == 2
    assert "'strange'" in result["error"]
    assert str(dtype).removeprefix("torch.") in result["error"]
    assert list(tmp_path.glob("*w.safetensors*")) == []
    assert run("export", url, "10", "--to", tmp_path / "w.ckpt") == 0
    assert equal(torch.load(tmp_path / "w.ckpt", weights_only=True), state)


def test_only_chooses_what_is_below_a_name(make_url, tmp_path, capsys):
    url = make_url("local")
    state = {"net": {"a.w": torch.ones(2), "a.b": torch.zeros(2), "c.w": torch.ones(1)}, "ema": [torch.ones(4)]}
    put(url, 10, state)
    file = tmp_path / "w.safetensors"
    expected = {
        "net": {"a.b", "a.w", "c.w"},
        "net.a": {"b", "w"},
        "ema": {"0"},
        None: {"net.a.b", "net.a.w", "net.c.w", "ema.0"},
    }
    for only, names in expected.items():
        assert run("export", url, "10", "--to", file, *(["--only", only] if only else [])) == 0
        assert set(safetensors.torch.load_file(file)) == names
        file.unlink()
    code, result = run_json(capsys, "export", url, "10", "--to", file, "--only", "ne")
    assert code == 2
    assert "['ema', 'net']" in result["error"]


def test_a_checkpoint_is_read_with_weights_only(url, tmp_path, capsys):
    model = Tied()
    state = trained(model)
    put(url, 10, state)
    code, result = run_json(capsys, "export", url, "10", "--to", tmp_path / "w.ckpt")
    assert code == 0
    loaded = torch.load(tmp_path / "w.ckpt", weights_only=True)
    for name in ("model", "optimizer", "progress"):
        assert equal(loaded[name], state[name]), name
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embedding.weight"].data_ptr()
    assert equal(loaded["rng"]["torch"], state["rng"]["torch"])
    # NumPy's generator has its state in an array, which the safe unpickler does not know.
    assert result["notes"] == ["numpy.ndarray became tensor: rng.numpy.1"]
    assert np.array_equal(loaded["rng"]["numpy"][1].numpy(), state["rng"]["numpy"][1])


def odd_values() -> dict[str, Any]:
    return {
        "queue": deque([1, 2]),
        "factory": defaultdict(list, a=[1]),
        "ordered": OrderedDict(b=2),
        "path": Path("/tmp/x"),
        "array": np.arange(3, dtype=np.int32),
        "texts": np.array(["a", "b"]),
        "scalar": np.float64(1.5),
        "frozen": frozenset([1]),
        "span": range(3),
        "set": {1, 2},
        "pair": (1, "x"),
        "keys": {1: "a", (2, 3): "b"},
        "complex": 1 + 2j,
        "dtype": torch.float16,
    }


def test_odd_types_become_plain_or_stay_as_they_are(make_url, tmp_path, capsys):
    url = make_url("local")
    put(url, 10, {"model": {"w": torch.ones(1)}, "odd": odd_values()})
    code, result = run_json(capsys, "export", url, "10", "--to", tmp_path / "w.ckpt")
    assert code == 0
    loaded = torch.load(tmp_path / "w.ckpt", weights_only=True)["odd"]
    assert loaded["queue"] == [1, 2]
    assert loaded["factory"] == {"a": [1]}
    assert type(loaded["ordered"]) is OrderedDict
    assert loaded["path"] == "/tmp/x"
    assert equal(loaded["array"], torch.arange(3, dtype=torch.int32))
    assert loaded["texts"] == ["a", "b"]
    assert loaded["scalar"] == 1.5
    assert loaded["frozen"] == {1}
    assert loaded["span"] == [0, 1, 2]
    same = ("set", "pair", "keys", "complex", "dtype")
    assert all(equal(loaded[name], odd_values()[name]) for name in same)
    assert len(result["notes"]) == 8


def test_a_dcp_directory_is_read_by_stock_dcp_bit_for_bit(url, tmp_path, capsys):
    model = Tied()
    state = trained(model)
    put(url, 10, state)
    assert run("export", url, "10", "--to", tmp_path / "dcp") == 0

    fresh = Tied()
    optimizer = torch.optim.AdamW(fresh.parameters())
    for parameter in fresh.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that it has a state to load into
    found = {"model": fresh.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"epoch": 0, "best": 0.0}}
    stock_dcp_load(found, tmp_path / "dcp")
    for name in found:
        assert equal(dict(found[name]), state[name]), name
    optimizer.load_state_dict(found["optimizer"])


def test_the_lines_of_the_documentation_load_a_dcp_directory_into_a_fresh_optimizer(url, tmp_path, monkeypatch):
    model = plain_model()
    state = trained(model)
    put(url, 10, state, parameters={"optimizer": [name for name, _ in model.named_parameters()]})
    monkeypatch.chdir(tmp_path)
    assert run("export", url, "10", "--to", "DIRECTORY/") == 0
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    [lines] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if '"DIRECTORY"' in block]

    torch.manual_seed(1)
    fresh = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        exec(lines, {"torch": torch, "model": fresh, "optimizer": optimizer})

    assert equal(dict(fresh.state_dict()), state["model"])
    assert equal(optimizer.state_dict(), state["optimizer"])


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_found_and_nothing_is_left(url, tmp_path, capsys, name):
    put(url, 10, trained(plain_model()))
    change(url, f"{at(10)}/{SHARD}", flip(0.9))
    code, result = run_json(capsys, "export", url, "10", "--to", tmp_path / name)
    assert code == 1
    assert "block 0" in result["error"]
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["export", "directory", "link"])
def test_nothing_that_is_there_is_replaced(make_url, tmp_path, name, kind, capsys):
    url = make_url("local")
    put(url, 10)
    to = tmp_path / name
    if kind == "export":
        assert run("export", url, "10", "--to", to) == 0
    elif kind == "directory":
        to.mkdir()
    else:
        to.symlink_to(tmp_path / "nowhere")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    code, result = run_json(capsys, "export", url, "10", "--to", to)

    assert code == 2
    assert f"{to} exists, and an export replaces nothing: choose another name, or remove it first" in result["error"]
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_nothing_is_exported_into_a_snapshot(make_url):
    url = make_url("local")
    put(url, 10)
    before = files(url)
    for name in (SHARD, "model.safetensors"):
        assert run("export", url, "latest", "--to", Path(url, at(10), name)) == 2
    assert files(url) == before


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_whose_name_cannot_be_made_durable_leaves_nothing(make_url, tmp_path, name, monkeypatch, capsys):
    url = make_url("local")
    put(url, 10)
    sync = os.fsync

    def sync_all_but_the_directory(handle: int) -> None:
        if os.path.samestat(os.fstat(handle), tmp_path.stat()):
            raise OSError(errno.EIO, "injected")
        sync(handle)

    monkeypatch.setattr(os, "fsync", sync_all_but_the_directory)

    code, result = run_json(capsys, "export", url, "10", "--to", tmp_path / name)

    assert code == 2
    assert "injected" in result["error"]
    assert {path.name for path in tmp_path.iterdir()} == {Path(url).name}


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "out.bin"],
        ["--to", "s3://bucket/out.ckpt"],
        ["--to", "out.ckpt", "--only", "model"],
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(make_url, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    url = make_url("local")
    put(url, 10)
    assert run("export", url, "10", *words) == 2
    assert {path.name for path in tmp_path.iterdir()} == {Path(url).name}


@pytest.mark.parametrize("format", [None, *target.FORMATS])
def test_missing_directories_are_made_and_a_refused_export_leaves_none_behind(make_url, tmp_path, capsys, format):
    """A plain state is none of an Accelerator, and has no config for Transformers."""
    url = make_url("local")
    put(url, 10)
    path = tmp_path / "made" / "too" / "out.safetensors"
    words = ["--format", format] if format else []

    code, result = run_json(capsys, "export", url, "10", "--to", path, *words)

    assert path.exists() == (tmp_path / "made").exists() == (code == 0), result
    assert (code == 0) == (format not in ("accelerate", "huggingface"))


def test_messages_of_the_function_name_its_arguments_and_the_command_for_the_rest(make_url, tmp_path):
    url = make_url("local")
    put(url, 10)
    path = tmp_path / "out.ckpt"
    lazysnap.export(url, path)
    for to, format, words in (
        (path, None, "exists, and an export replaces nothing: choose another name"),
        (tmp_path / "out.bin", None, "choose the option `format`"),
        (tmp_path / "model", "huggingface", "`lazysnap export --config DIR` copies one"),
    ):
        with pytest.raises(ConfigError) as refused:
            lazysnap.export(url, to, format=format)
        assert words in str(refused.value)


def test_the_format_can_be_named(make_url, tmp_path):
    url = make_url("local")
    put(url, 10)
    assert run("export", url, "10", "--to", tmp_path / "weights.bin", "--format", "safetensors") == 0
    assert set(safetensors.torch.load_file(tmp_path / "weights.bin")) == {"w"}
    assert run("export", url, "10", "--to", f"{tmp_path}/a.b/") == 0
    assert (tmp_path / "a.b" / ".metadata").is_file()


@pytest.mark.parametrize("name", FORMATS)
def test_a_full_disk_leaves_nothing_and_is_exit_code_2(make_url, tmp_path, name, capsys):
    url = make_url("local")
    put(url, 10, {"model": {"w": torch.rand(1_000_000)}})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # as a quota
    try:
        code = run("export", url, "10", "--to", tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2, capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {Path(url).name}


BOUNDED_EXPORT = """
import pathlib, re, resource, sys
from lazysnap.cli import main
url, to, *words = sys.argv[1:]
first = pathlib.Path(to).with_name("first-" + pathlib.Path(to).name)
assert main(["export", url, "1", "--to", str(first), *words]) == 0  # what is imported takes memory, too
used = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (256 << 20),) * 2)
sys.exit(main(["export", url, "10", "--to", to, *words]))
"""


def test_memory_does_not_grow_with_the_snapshot(forking_python, url, tmp_path):
    """Mapped files take page cache, which the system takes back; all other memory is bounded here."""
    generators = {"python": 1, "numpy": 2, "torch": torch.zeros(8, dtype=torch.uint8)}
    of_accelerator = {"rng": generators, "accelerate": {"step": 1}}
    put(url, 1, {"model": {"w": torch.rand(10)}, **of_accelerator})
    large = {f"w{number}": torch.full((16_000_000,), 0.5) for number in range(6)}
    put(url, 10, {"model": large, "optimizer": {"state": {0: torch.full((16_000_000,), 0.25)}}, **of_accelerator})

    for name in [*FORMATS, "out.accelerate"]:
        words = [forking_python, "-c", BOUNDED_EXPORT, url, str(tmp_path / name)]
        if name == "out.accelerate":
            words += ["--format", "accelerate"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, (name, done.stderr)


class DeletesCheckpoint(MemoryFileSystem):
    """A level that answers only when a training has deleted a directory of ``save_state``."""

    protocol = "deletescheckpoint"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    directory: ClassVar[Path | None] = None

    def __init__(self, **options):
        super().__init__(**options)
        if self.directory is not None:
            shutil.rmtree(self.directory)


def test_an_export_beside_a_training_does_not_make_a_deleted_directory_again(tmp_path, monkeypatch):
    fsspec.register_implementation("deletescheckpoint", DeletesCheckpoint, clobber=True)
    url = "deletescheckpoint://place/run"
    generators = {"python": 1, "numpy": 2, "torch": torch.zeros(8, dtype=torch.uint8)}
    put(url, 10, {"model": {"w": torch.rand(10)}, "rng": generators, "accelerate": {"step": 1}})
    directory = tmp_path / "checkpoint_0"
    name_snapshot(str(directory), Named(url, RUN, 10))
    monkeypatch.setattr(DeletesCheckpoint, "directory", directory)
    arguments = {"directory": str(directory), "place": url, "storage_options": {}, "superseded": []}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(arguments)))

    assert export_process() == 0

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_killed_export_leaves_nothing_under_its_name(forking_python, make_url, tmp_path, name):
    """Also at the last moment: every file is written, and none has its name yet."""
    url = make_url("local")
    put(url, 20)
    to = tmp_path / name
    program = "import sys; from lazysnap.cli import main; sys.exit(main())"
    words = [forking_python, "-c", program, "export", url, "20", "--to", str(to)]
    environment = {**os.environ, "LAZYSNAP_FAULT": "export.whole:1:kill"}

    assert subprocess.run(words, env=environment, check=False).returncode == -signal.SIGKILL

    assert not to.exists()


@pytest.mark.parametrize("name", FORMATS)
def test_ctrl_c_leaves_nothing(make_url, tmp_path, name, monkeypatch):
    url = make_url("local")
    put(url, 10)
    start = Progress.start

    def start_and_interrupt(self: Progress) -> None:
        start(self)
        os.kill(os.getpid(), signal.SIGINT)  # when the work has just begun

    monkeypatch.setattr(Progress, "start", start_and_interrupt)
    assert run("export", url, "10", "--to", tmp_path / name) == 130
    assert {path.name for path in tmp_path.iterdir()} == {Path(url).name}
