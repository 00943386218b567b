"""The ``Trainer`` of Transformers: a callback, and ``resume_from_checkpoint="latest"``."""

from importlib.util import find_spec


def _check_installed() -> None:
    try:
        is_installed = find_spec("transformers") is not None
    except (ImportError, ValueError):  # an import hook refuses it, or a test put None in its place
        is_installed = False
    if not is_installed:
        raise ModuleNotFoundError(
            "LazyTrainerCallback needs Transformers, which is not installed here: run "
            '`pip install "lazysnap[transformers]"`',
            name="transformers",
        )


# Before any other import: what is missing is Transformers, not one of the packages that come with it.
_check_installed()

from lazysnap.integrations.transformers.callback import LazyTrainerCallback, attach_trainer  # noqa: E402

__all__ = ["LazyTrainerCallback", "attach_trainer"]
