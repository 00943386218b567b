"""Promises of the package as a whole: its names, what importing it costs, what its documents say."""

import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lazysnap
from lazysnap import errors

ROOT = Path(__file__).parent.parent
DOCUMENTED = {
    "ConfigError",
    "FormatError",
    "JobBusy",
    "KeepBest",
    "KeeperError",
    "LazyAccelerator",
    "LazySnapError",
    "LevelError",
    "SnapshotNotFound",
    "StateError",
    "WaitTimeout",
    "export",
    "LazySnapshotCallback",
    "LazyTrainerCallback",
    "MemoryLevel",
    "PersistentLevel",
    "Redundancy",
    "ResumableLoader",
    "SnapshotConfig",
    "SnapshotEngine",
    "attach",
    "load_weights",
    "register_type",
    "run_id",
}
TORCH_FREE = (
    "lazysnap",
    "lazysnap.memory.capture_reader",
    "lazysnap.memory.slots",
    "lazysnap.cli",
    "lazysnap.cli.report",
    "lazysnap.cli.report_page",
    "lazysnap.config",
    "lazysnap.errors",
    "lazysnap.exports",
    "lazysnap.faults",
    "lazysnap.keeper",
    "lazysnap.levels",
    "lazysnap.parity.codes",
    "lazysnap.parity.groups",
    "lazysnap.resolver",
    "lazysnap.shard",
    "lazysnap.warm.supervisor",
)


def test_nothing_draws_from_the_global_random_generators():
    """They are the training's, also where storage is written on a thread of its process."""
    drawn = re.compile(
        r"(?<![\w.])(random|np\.random|numpy\.random)\."
        r"(random|uniform|getrandbits|rand\w*|choices?|shuffle|sample|bytes|gauss|normal)\("
    )
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "lazysnap").rglob("*.py")
        for line in path.read_text().splitlines()
        if drawn.search(line)
    }
    assert not found


@pytest.mark.slow
def test_importing_the_integrations_draws_no_random_number():
    """A program may seed the generators first, and attach lazysnap then."""
    code = """
import random
before = random.getstate()
import lazysnap.integrations.accelerate
import lazysnap.integrations.transformers
import lazysnap.integrations.lightning
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=ROOT)


def test_the_exported_names_are_exactly_the_documented_ones():
    """A new name is a promise: it is added here and in the README or the docs, on purpose."""
    assert set(lazysnap.__all__) == DOCUMENTED
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    assert {name for name in DOCUMENTED if name not in texts} == set()


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_every_exported_name_can_be_had_and_is_documented(name):
    value = getattr(lazysnap, name)
    assert value.__doc__
    assert name in dir(lazysnap)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lazysnap.no_such_name


@pytest.mark.slow
def test_importing_it_imports_neither_torch_nor_numpy_nor_lightning():
    """One process imports one module after the other, and looks behind each."""
    code = """
import importlib, json, sys
heavy = {"torch", "numpy", "lightning", "pytorch_lightning", "transformers"}
found = {}
for module in sys.stdin.read().split():
    importlib.import_module(module)
    found[module] = sorted(heavy & {*sys.modules})
print(json.dumps(found))
"""
    modules = "\n".join(TORCH_FREE)
    done = subprocess.run(
        [sys.executable, "-c", code], input=modules, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {module: [] for module in TORCH_FREE}


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == lazysnap.__version__


def test_every_guarantee_names_a_test_that_is_there():
    rows = [
        row
        for row in (ROOT / "docs" / "guarantees.md").read_text().splitlines()
        if row.startswith("| ") and "shown by" not in row and "not built yet" not in row
    ]
    assert rows
    for row in rows:
        [(path, name)] = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert f"def {name}(" in (ROOT / path).read_text(), row


def test_what_the_architecture_names_as_deciding_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Where it is decided")[2].partition("\n## ")[0]
    tops = {path.stem for path in (ROOT / "lazysnap").iterdir()}
    names = [name for name in re.findall(r"`([a-z_]+\.[\w.]+)`", table) if name.split(".")[0] in tops]
    assert len(names) > 20
    for name in names:
        assert pkgutil.resolve_name(f"lazysnap.{name}"), name
    assert [path for path in re.findall(r"`(tests/[\w/.]+)`", table) if not (ROOT / path).exists()] == []


def drawn_tree(text: str) -> dict[str, tuple[str, set[str]]]:
    """Name -> (parent in the tree, bases in parentheses), read from the drawing."""
    tree: dict[str, tuple[str, set[str]]] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"^ {4}((?:│   |    )*(?:[├└]── )?)(\w+) *(?:\((\w+(?:, \w+)*)\))?(?:  .*)?$", line)
        if match and (match[1] or match[2] == "LazySnapError"):
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            tree[match[2]] = (path[depth - 1] if depth else "Exception", set((match[3] or "").split(", ")) - {""})
    return tree


def test_the_tree_of_exceptions_is_drawn_as_it_is():
    assert errors.__doc__ is not None
    drawn = drawn_tree(errors.__doc__)
    real = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert drawn.keys() == real.keys()
    for name, kind in real.items():
        own = {base.__name__ for base in kind.__bases__}
        parent, builtin = drawn[name]
        assert own == {parent} | builtin, name


def test_every_exception_has_the_one_root():
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(kinds) == 9
    assert all(issubclass(kind, errors.LazySnapError) for kind in kinds)


def test_the_package_is_marked_as_typed():
    spec = importlib.util.find_spec("lazysnap")
    assert spec is not None
    assert spec.origin is not None
    assert (Path(spec.origin).parent / "py.typed").is_file()


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs" / "api.md").read_text()
    assert not [name for name in DOCUMENTED - {*vars(errors)} if f":: lazysnap.{name}\n" not in reference]
    assert "automodule:: lazysnap.errors" in reference
