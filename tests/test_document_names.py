"""Names in the prose of the pages are names of something: files, tests, settings, methods, variables."""

import ast
import inspect
import re
from importlib.util import find_spec

import pytest
from support.documents import PAGES, ROOT, prose

import lazysnap
from lazysnap.engine.messages import MessageKind

PLACES = r"(?:tests/|examples/|benchmarks/|lazysnap/(?=[\w/]*\.py))"
"""``lazysnap/stall_ms`` and the like are figures."""
SETTINGS = [name for name in lazysnap.__all__ if inspect.isclass(getattr(lazysnap, name))]
SOURCES = "".join(path.read_text() for name in ("lazysnap", "tests") for path in (ROOT / name).rglob("*.py"))
OF_OTHERS = {"tests/test_state_checkpointing.py"}
"""A file of Accelerate."""
OTHER_MEANINGS = {
    "place": r"\b(in|takes?|took) (its|the) place\b|\bin place of\b|\bits own place\b|wrong places",
    "release": r"\bafter a release\b|\bwas released\b|\bit releases\b",
    "source": r"\bsources and documents\b|compares the sources|holds its sources|for the source\b",
    "base": r"\(the \*base\*\)|\bbase step\b|\bthan the base\b",
    "plan": r"\bto plan\b|\bplanned training|\bplan three times|\bgathers plans\b",
    "start": r"\bat the start or end\b|\bStart and end\b",
    "job": r"\bkill a job\b|\brequeued job\b|\bcontainer or job\b|\bjob's control groups\b|\ba job writes\b",
}
"""A term, and phrases in which texts for users had it with a meaning that is not the one in architecture.md, Terms."""


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


def templates():
    """Return the texts in the package; ``\0`` stands for each value that is put in."""
    for path in (ROOT / "lazysnap").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "\0" for part in parts]
            if all(isinstance(text, str) for text in texts) and isinstance(parts[0], ast.Constant | ast.FormattedValue):
                yield re.sub(r"%(\(\w+\))?[.\d]*[a-z]", "\0", "".join(texts))


@pytest.mark.parametrize("term", OTHER_MEANINGS)
def test_a_term_has_one_meaning_in_pages_and_messages(term):
    texts = [*(" ".join(page.read_text().split()) for page in (*PAGES, ROOT / "CHANGELOG.md")), *templates()]
    assert [found[0] for text in texts for found in re.finditer(OTHER_MEANINGS[term], text)] == []


def explained_messages():
    """Return the messages on the page of messages: what is quoted with a ``…`` for a value."""
    text = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## ")[2].split())
    return sorted({quote for quote in re.findall(r"`([^`]+)`", text) if "…" in quote and "Is a direc" not in quote})


def says(template, message):
    """True if a text of the package begins as that message, or holds it if it begins with a value."""
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    return re.match(pattern, template, re.DOTALL) is not None


@pytest.mark.slow
def test_each_message_that_the_page_of_messages_explains_is_said_by_something():
    texts = {*templates()}
    assert [message for message in explained_messages() if not any(says(text, message) for text in texts)] == []


def test_each_message_of_an_engine_is_explained_in_the_page_of_messages():
    texts = {event: re.sub(r"%\(\w+\)[.\d]*[a-z]", "\0", event.value.text) for event in MessageKind}
    composed = {event for event, text in texts.items() if text == "\0"}  # of texts that the page explains one by one
    missing = [
        event.name
        for event, text in texts.items()
        if event not in composed and not any(says(text, message) for message in explained_messages())
    ]
    assert missing == []
