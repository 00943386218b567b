"""Names in the prose of the pages are names of something: files, tests, settings, methods, variables."""

import inspect
import re
from importlib.util import find_spec

import pytest
from support.documents import PAGES, ROOT, prose

import lazysnap

PLACES = r"(?:tests/|examples/|benchmarks/|lazysnap/(?=[\w/]*\.py))"
"""``lazysnap/stall_ms`` and the like are figures."""
SETTINGS = [name for name in lazysnap.__all__ if inspect.isclass(getattr(lazysnap, name))]
SOURCES = "".join(path.read_text() for name in ("lazysnap", "tests") for path in (ROOT / name).rglob("*.py"))
OF_OTHERS = {"tests/test_state_checkpointing.py"}
"""A file of Accelerate."""


def code(page):
    """Return what stands between backticks in the prose of a page, each on one line."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_a_page_names_are_there(page):
    for path, test in re.findall(rf"`({PLACES}[\w/.-]*)(?:::(\w+))?`", prose(page)):
        file = ROOT / path
        assert file.exists() or path in OF_OTHERS, path
        assert not test or f"def {test}(" in file.read_text(), f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_a_page_names_are_parameters_or_attributes(page):
    for text in code(page):
        for name, words in re.findall(rf"\b({'|'.join(SETTINGS)})\(([^()]*)", text):
            known = inspect.signature(getattr(lazysnap, name)).parameters
            assert set(re.findall(r"\b(\w+)=", words)) <= known.keys(), text
        for name, attribute in re.findall(rf"\b({'|'.join(SETTINGS)})\.(\w+)", text):
            kind = getattr(lazysnap, name)
            assert attribute in {*dir(kind), *inspect.signature(kind).parameters}, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_methods_of_the_engine_and_names_of_the_package_are_there(page):
    for text in code(page):
        for name in re.findall(r"(?<![\w/.])engine\.([a-z_]+)\b(?!/)", text):
            assert hasattr(lazysnap.SnapshotEngine, name) or find_spec(f"lazysnap.engine.{name}"), text
        for name in re.findall(r"(?<![\w/.-])lazysnap\.([A-Za-z_]+)\(", text):
            assert name in lazysnap.__all__, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_of_the_environment_that_a_page_names_are_read(page):
    for name in re.findall(r"\bLAZYSNAP_[A-Z_]+\b", page.read_text()):
        assert re.search(rf'"{name}"', SOURCES), name
