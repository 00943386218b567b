"""How deep the small state may be nested, and room on the stack for that depth."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_STATE_DEPTH = 100
"""Containers within each other, the state itself counted. Writers and readers refuse more (docs/format.md)."""

_T = TypeVar("_T")


def with_stack(work: Callable[[], _T]) -> _T:
    """``work()``; where the caller left too little of Python's stack, once more in a thread with a stack of its own.

    ``work`` must be such that it can be done twice. Raises: what it raises; RecursionError only if both times.
    """
    try:
        return work()
    except RecursionError:
        pass
    with ThreadPoolExecutor(1, "lazysnap-stack") as thread:
        return thread.submit(work).result()
