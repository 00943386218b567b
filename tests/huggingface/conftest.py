"""What tests of the ``Trainer`` of Transformers share."""

import pytest

_NOT_OURS = (
    "ignore:.*fork.*:DeprecationWarning",
    "ignore:.*is_gradient_checkpointing.*:FutureWarning",
    "ignore:.*fan_in_fan_out.*:UserWarning",
    "ignore:.*pin_memory.*:UserWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if "huggingface" in item.path.parts:
            for text in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(text))
