"""``docs/api.md`` has every public name, all public members of its classes, and what these return."""

import dataclasses
import importlib
import inspect
import re
import typing

import pytest
from support.documents import ROOT

import lazysnap

PAGE = (ROOT / "docs" / "api.md").read_text()
CLASSES = [name for name in lazysnap.__all__ if inspect.isclass(getattr(lazysnap, name))]
FUNCTIONS = [name for name in lazysnap.__all__ if inspect.isfunction(getattr(lazysnap, name))]


def options_of(name):
    """The lines below a class on the page."""
    match = re.search(rf"autoclass:: {re.escape(name)}\n((?:   :.*\n)*)", PAGE)
    return match and match[1]


def public_members(kind):
    """Names that a class of lazysnap adds to those of the frameworks."""
    ours = set()
    theirs = set()
    for base in kind.__mro__:
        names = ours if base.__module__.startswith("lazysnap") else theirs
        names.update(name for name in vars(base) if not name.startswith("_"))
    return ours - theirs


def results_of(function):
    """The classes of lazysnap in what a function returns."""
    hint = typing.get_type_hints(function).get("return")
    for part in (hint, *typing.get_args(hint)):
        if inspect.isclass(part) and part.__module__.startswith("lazysnap"):
            yield part


def test_the_page_has_exactly_the_exported_names():
    named = set(re.findall(r"auto(?:class|function):: lazysnap\.(\w+)\n", PAGE))
    errors = set()
    if "automodule:: lazysnap.errors" in PAGE:
        errors = {name for name in CLASSES if issubclass(getattr(lazysnap, name), Exception)}
    assert named | errors == set(lazysnap.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_all_public_members_of_a_class_are_on_the_page(name):
    kind = getattr(lazysnap, name)
    if issubclass(kind, Exception):
        return  # the whole module is there
    options = options_of(f"lazysnap.{name}")
    assert options is not None
    listed = re.search(r":members: (.+)", options)
    if listed is None:
        assert ":members:" in options
        return
    named = set(listed[1].split(", "))
    assert public_members(kind) <= named
    assert [member for member in named if not hasattr(kind, member)] == []


def test_what_public_functions_and_methods_return_is_on_the_page():
    functions = [getattr(lazysnap, name) for name in FUNCTIONS]
    for name in CLASSES:
        kind = getattr(lazysnap, name)
        if not issubclass(kind, Exception):
            members = [inspect.getattr_static(kind, member) for member in public_members(kind)]
            functions += [member for member in members if inspect.isfunction(member)]
    results = {result for function in functions for result in results_of(function)}
    assert results
    missing = []
    for result in results - {getattr(lazysnap, name) for name in CLASSES}:
        if options_of(f"{result.__module__}.{result.__name__}") is None:
            missing.append(result)
    assert missing == []


def test_the_engine_has_no_other_public_members():
    assert public_members(lazysnap.SnapshotEngine) == {
        *("restore", "boundary", "gate", "keep", "keep_best", "release", "rollback", "wait", "close", "abandon"),
        *("statistics", "all_steps", "step", "run_id"),
    }


def test_there_are_no_more_than_26_settings():
    kinds = (lazysnap.SnapshotConfig, lazysnap.PersistentLevel, lazysnap.MemoryLevel, lazysnap.Redundancy)
    assert sum(len(dataclasses.fields(kind)) for kind in kinds) <= 26


def test_classes_that_are_named_by_their_module_are_there():
    for path in re.findall(r"autoclass:: (lazysnap\.[\w.]+\.\w+)\n", PAGE):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
