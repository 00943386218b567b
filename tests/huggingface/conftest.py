"""What tests of the ``Trainer`` of Transformers share."""

import pytest
from support.zygote import Zygote

_IMPORTED = (
    "torch._dynamo",
    "torch.nn.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
    "accelerate",
    "peft",
    "lazysnap.engine.engine",
    "lazysnap.integrations.transformers",
)
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


@pytest.fixture(scope="session")
def hf_zygote():
    """Starts the trainings of all tests of a worker."""
    zygote = Zygote(_IMPORTED)
    yield zygote
    zygote.close()
