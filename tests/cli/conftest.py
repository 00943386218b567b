"""Levels of each kind, empty and gone afterwards."""

import uuid

import fsspec
import pytest


@pytest.fixture
def make_url(tmp_path):
    """Make the URL of a level: a directory, or a place in fsspec's memory."""
    made = []

    def make(kind: str) -> str:
        name = uuid.uuid4().hex
        if kind == "local":
            return str(tmp_path / name)
        made.append(f"memory://cli-{name}/run")
        return made[-1]

    yield make
    for url in made:
        filesystem, root = fsspec.core.url_to_fs(url)
        top = root.rsplit("/", 1)[0]
        if filesystem.exists(top):
            filesystem.rm(top, recursive=True)


@pytest.fixture
def url(make_url):
    return make_url("local")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Paths of temporary directories are long: tables shall not wrap because of them."""
    monkeypatch.setenv("COLUMNS", "250")
