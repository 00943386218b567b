"""Limits of the format (docs/format.md): writers respect them, readers refuse files that exceed them.

Every number, count and nesting is compared with its limit before anything is allocated.
"""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

MAX_RANKS = 1 << 20
"""Ranks of a snapshot, and ranks in one file."""
MAX_COUNT = (1 << 63) - 1
"""Steps, bytes, nanoseconds."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format, without the length itself."""
MAX_TENSORS = 1 << 20
"""Tensors in one file."""
MAX_DIMS = 64
MAX_BLOCK_BYTES = 256 << 20
"""The largest block of one checksum; it is read as a whole before a byte of it is used."""
MAX_MANIFEST_BYTES = 64 << 20
"""About 250 bytes for each tensor of a sharded state: enough for 250,000 tensors in one file."""
MAX_VALUES = 1 << 22
"""Commas and opening brackets of a JSON text, also inside strings, which limits the number of values: each takes up to
150 bytes after parsing. A tensor of a sharded state has about 16 in a manifest, and 9 in a header.
"""
MAX_NAME = 4096
"""Characters of the name of a tensor, and of names and versions of packages."""
MAX_NESTING = 312
"""Nested lists and objects in a manifest."""
MAX_HEADER_NESTING = 3
MAX_KEEP_FILE_BYTES = 4096
"""The largest object that holds a name."""

MAX_STATE_DEPTH = 100
"""Nested containers in the training state, including the state itself."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Pairs = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def load_json(data: "bytes | memoryview", nesting: int, pairs: Pairs | None = None) -> Any:
    """Parse untrusted JSON.

    Raises: ValueError, if it is no JSON, is nested more than ``nesting`` deep, or has more than ``MAX_VALUES`` values.
    """
    raw = bytes(data)
    check_values(raw)
    try:
        text = raw.decode("utf-8", "surrogatepass")
        value = with_stack(json.loads, text, object_pairs_hook=pairs, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError(f"nested more than {nesting} deep") from error
    level = [value]
    for _ in range(nesting + 1):
        next_level = []
        for item in level:
            next_level += _children(item)
        if not next_level:
            return value
        level = next_level
    raise ValueError(f"nested more than {nesting} deep")


def check_values(text: bytes) -> None:
    """Check, without parsing, that a JSON text has at most ``MAX_VALUES`` values. Raises: ValueError."""
    count = sum(map(text.count, (b",", b"[", b"{")))
    if count > MAX_VALUES:
        raise ValueError(f"{count} values, the limit is {MAX_VALUES}")


def _refuse(name: str) -> None:
    """Refuse NaN and infinities: JSON has none, and the encoding of the state has tags for them."""
    raise ValueError(f"{name} is no JSON")


def _children(value: Any) -> list[Any]:
    """Return the lists and objects directly in a list or an object."""
    items: Iterable[Any] = ()
    if type(value) is dict:
        items = value.values()
    elif type(value) is list:
        items = value
    return [item for item in items if type(item) in (dict, list)]


def with_stack(work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Return ``work(*args, **kwargs)``. If Python's stack is too small for that, run it again in a new thread.

    ``work`` may run twice. Raises: what ``work`` raises; RecursionError, only if both runs raise it.
    """
    try:
        return work(*args, **kwargs)
    except RecursionError:
        pass
    with ThreadPoolExecutor(1, "lazysnap-stack") as thread:
        return thread.submit(work, *args, **kwargs).result()
