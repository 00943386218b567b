"""Warnings of the frameworks themselves, about things that these tests do on purpose or cannot change."""

import logging

import pytest

_NOT_OURS = (
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore::lightning_fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:'set_vital' is deprecated.*:UserWarning",  # torchdata
    "ignore:.*fork.*:DeprecationWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if "lightning" in item.path.parts:
            for text in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(autouse=True)
def _quiet():
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
