"""Searches for the random generators of data loaders, samplers, datasets and transforms.

It searches attributes, lists, tuples, dicts, closures, arguments of ``functools.partial``, class attributes and module
globals that a dataset's functions use. It does not find a generator inside a C extension, or one that a function
creates at each call.
"""

import functools
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

MOST_VISITS = 50_000
"""Maximum values of one search: about 50 ms."""
_MOST_DEPTH = 12
_LONG = 64
"""Minimum items of a container without generators that is remembered, so that it is searched only once."""
_PLAIN = (
    *(bool, int, float, complex, str, bytes, bytearray, memoryview, type(None), type, types.ModuleType, torch.Tensor),
    logging.Logger,  # it references all loggers of the process
)
_SEQUENCES = (list, tuple, deque)
"""No sets: their order differs between processes."""
_READING = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward")
"""Methods of a dataset, sampler or transform that may name generators of their module."""
_SKIPPED = ("_iterator", "_lazysnap_position", "_parameters", "_buffers")
"""Attributes that are not searched: the iterator of a loader lives for one epoch, and draws from the loader."""
_LIBRARIES = frozenset([*sys.stdlib_module_names, "torch", "numpy"])
"""Packages whose functions use no generator of a dataset."""


class GeneratorSearch:
    """One search below some objects.

    ``barren``: long containers without generators; the search adds to it. It references them, so that their ids are not
    reused.
    """

    def __init__(self, barren: dict[int, tuple[Any, int]]) -> None:
        self.generators: dict[str, Any] = {}
        """The generators by path."""
        self.is_complete = True
        """False if there were too many values to search all."""
        self._barren = barren
        self._seen: set[int] = set()
        self._visits = 0

    def run(self, roots: Iterable[Any]) -> None:
        """Search below each of ``roots``."""
        for number, root in enumerate(roots):
            self._visit(root, str(number), 0)

    def _visit(self, value: Any, path: str, depth: int) -> None:
        try:
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                return
        except ReferenceError:  # a weak proxy whose object is gone
            return
        if self._visits >= MOST_VISITS or depth > _MOST_DEPTH:
            self.is_complete = False
            return
        self._visits += 1
        self._seen.add(id(value))
        if is_generator(value):
            self.generators[path] = value
        elif isinstance(value, (*_SEQUENCES, dict)):  # other mappings may be the data itself, such as an HDF5 file
            self._visit_container(value, path, depth)
        else:
            for name, inner in _parts(value):
                # Nodes of torchdata form a chain of any length.
                step = 0 if type(value).__module__.startswith("torchdata.nodes") else 1
                self._visit(inner, f"{path}.{name}", depth + step)

    def _visit_container(self, container: Any, path: str, depth: int) -> None:
        remembered = self._barren.get(id(container))
        if remembered is not None and remembered[1] == len(container):
            return
        count_before = len(self.generators)
        was_complete = self.is_complete
        self.is_complete = True
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for name, item in items:
            if type(item) not in _PLAIN:  # a quick answer for most: ``_visit`` knows subclasses
                self._visit(item, f"{path}.{name}", depth + 1)
        if self.is_complete and len(container) >= _LONG and len(self.generators) == count_before:
            self._barren[id(container)] = container, len(container)
        self.is_complete = self.is_complete and was_complete


def is_generator(value: Any) -> bool:
    """True for a random generator that is not one of the global ones."""
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        return value is not getattr(random, "_inst", None)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(value, numpy.random.RandomState):
        return value is not numpy.random.mtrand._rand
    return isinstance(value, numpy.random.Generator)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that may contain generators, by name."""
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield "args", value.args
        yield "keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    else:
        for name in _attributes(value):
            yield name, getattr(value, name, None)
        yield from _parts_of_class(type(value))


def _attributes(value: Any) -> list[str]:
    """Return the names of an object's own attributes, also those in slots."""
    names = [name for name in getattr(value, "__dict__", ()) if name not in _SKIPPED]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        if isinstance(slots, str):
            names.append(slots)
        else:
            names += [name for name in slots if not name.startswith("__")]
    return names


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the closure variables, the defaults and the used module globals of a function."""
    if function.__module__ is None or function.__module__.partition(".")[0] in _LIBRARIES:
        return
    for number, cell in enumerate(function.__closure__ or ()):
        if cell != types.CellType():
            yield f"closure{number}", cell.cell_contents
    yield "defaults", function.__defaults__
    yield "kwdefaults", function.__kwdefaults__
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if is_generator(value) or isinstance(value, types.FunctionType):
            yield f"globals.{name}", value


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the generators among the attributes of a class, and the methods that read a dataset."""
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(owner).items():
            if is_generator(value) or (name in _READING and isinstance(value, types.FunctionType)):
                yield f"class.{name}", value
