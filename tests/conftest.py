"""What tests on several workers must share: a server that is started once, a process that others are forked from."""

import pathlib

import pytest

SHARED = ("nfs", "faults", "many")


def pytest_collection_modifyitems(items):
    for item in items:
        directory = pathlib.Path(item.path).parent.name
        if directory in SHARED:
            item.add_marker(pytest.mark.xdist_group(directory))
