"""Every private name of a framework that lazysnap uses is in a table, and exists in what is installed.

So is every private name of the engine that the integrations use.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import lazysnap

PACKAGE = Path(lazysnap.__file__).parent
PAGE = PACKAGE.parent / "docs" / "private-names.md"
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"
PRIVATE = re.compile(r"_[a-zA-Z][a-zA-Z0-9_]*")
ENGINE_NAME = re.compile(r"(?<![a-zA-Z])(?:Snapshot)?[eE]ngine(?:\(\))?\.(_\w+)")
ROW = re.compile(r"^\| `(?P<owner>[\w.]+)` \| (?P<names>`[^|]+`) \| [^|]+ \|$", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    """Return (owner, name) of each private name in the table."""
    pairs = []
    for row in ROW.finditer(PAGE.read_text()):
        for name in re.findall(r"`(\w+)`", row["names"]):
            pairs.append((row["owner"], name))
    return pairs


def names_of_ours(trees: list[ast.Module]) -> set[str]:
    """Return the names that the package itself defines."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                    names.add(node.attr)
                case ast.Name(ctx=ast.Store()):
                    names.add(node.id)
    return names


def names_used(trees: list[ast.Module]) -> set[str]:
    """Return all private attributes, imports and names in strings of the package."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.Attribute():
                    names.add(node.attr)
                case ast.Constant(value=str()):
                    names.add(node.value)
                case ast.ImportFrom(module=str()) if not node.module.startswith("lazysnap"):
                    names.update(node.module.split("."))
                    names.update(alias.name for alias in node.names)
    return {name for name in names if PRIVATE.fullmatch(name)}


def test_the_table_has_every_private_name_that_the_package_uses() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    used = names_used(trees) - names_of_ours(trees)
    of_ours = {name for name in used if name.startswith("_lazysnap")}

    listed = {name for _, name in rows()}

    assert listed == used - of_ours


@pytest.mark.parametrize(("owner", "name"), rows(), ids=lambda value: str(value))
def test_the_installed_packages_have_each_name(owner: str, name: str) -> None:
    """The object has it, or its source mentions it: attributes of instances are set there."""
    pytest.importorskip(owner.split(".")[0])
    found = resolve(owner)

    has_attribute = hasattr(found, name)
    has_module = hasattr(found, "__path__") and importlib.util.find_spec(f"{owner}.{name}") is not None
    assert has_attribute or has_module or re.search(rf"\b{name}\b", inspect.getsource(found))


def test_the_table_has_every_private_name_of_the_engine_that_integrations_use() -> None:
    used = set()
    for path in (PACKAGE / "integrations").rglob("*.py"):
        used.update(ENGINE_NAME.findall(path.read_text()))
    table = ARCHITECTURE.read_text().partition("| of the engine |")[2].partition("\n\n")[0]
    listed = set()
    for row in table.splitlines():
        listed.update(re.findall(r"`(_\w+)`", row))

    assert listed == used


def resolve(path: str) -> object:
    """Return the module, class or function of a dotted path."""
    words = path.split(".")
    for number in range(len(words), 0, -1):
        try:
            found: object = importlib.import_module(".".join(words[:number]))
        except ModuleNotFoundError:
            continue
        for word in words[number:]:
            found = getattr(found, word)
        return found
    raise LookupError(path)
