"""Accelerate: ``LazyAccelerator``, and ``attach`` for an accelerator that somebody else made."""

from importlib.util import find_spec

# Before any other import: what is missing is Accelerate, not one of the packages that come with it.
if find_spec("accelerate") is None:
    raise ModuleNotFoundError(
        'LazyAccelerator needs Accelerate, which is not installed here: run `pip install "lazysnap[accelerate]"`',
        name="accelerate",
    )

from lazysnap.integrations.accelerate.accelerator import LazyAccelerator, attach_accelerator

__all__ = ["LazyAccelerator", "attach_accelerator"]
