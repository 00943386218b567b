"""The Lightning package in use: ``lightning.pytorch`` and ``pytorch_lightning`` have the same code in different
classes.

A ``Trainer`` only takes callbacks of its own package. Importing the other package takes seconds, so the callback gets
its base classes from the packages that the program has imported.
"""

import functools
import sys
import types
from importlib import import_module
from typing import Any

from lazysnap.integrations.frameworks import is_installed, require

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_EXTENDED = "_lazysnap_extended_class"
"""The attribute of a class from ``extended`` with the class that it extends."""


def callback_bases() -> tuple[type, ...]:
    """Return the ``Callback`` classes of the imported packages; of the installed one if none is imported.

    Raises: ModuleNotFoundError, if neither package is installed.
    """
    loaded = [name for name in _PACKAGES if hasattr(sys.modules.get(name), "Callback")]
    if not loaded:
        require("LazySnapshotCallback", "Lightning", "lightning", "lightning", "pytorch_lightning")
        loaded = [name for name in _PACKAGES if is_installed(name.split(".", 1)[0])][:1]
    return tuple(import_module(name).Callback for name in loaded)


def extended(cls: type) -> type:
    """Return ``cls``, or a subclass of it that is also a ``Callback`` of the packages that were imported later."""
    missing = tuple(base for base in callback_bases() if not issubclass(cls, base))
    if not missing:
        return cls
    return _extended_by(cls, missing)


@functools.cache
def _extended_by(cls: type, bases: tuple[type, ...]) -> type:
    def add_names(body: dict[str, Any]) -> None:
        body["__module__"] = cls.__module__
        body["__qualname__"] = cls.__qualname__
        body[_EXTENDED] = cls

    return types.new_class(cls.__name__, (cls, *bases), exec_body=add_names)


def class_of_program(instance: Any) -> type:
    """Return the class of ``instance`` in the program, without the bases that ``extended`` added."""
    kind = type(instance)
    extended_class: type = vars(kind).get(_EXTENDED, kind)
    return extended_class


def new_of_class(cls: type) -> Any:
    """Return an instance of ``cls`` without calling its constructor, for pickles."""
    return object.__new__(cls)


def neighbour(instance: Any, name: str) -> Any:
    """Return the object ``name`` in the module of the class of ``instance``: a private type of the same package."""
    return getattr(sys.modules[type(instance).__module__], name)


def overrides(instance: Any, hook: str) -> bool:
    """True if the program defines ``hook`` itself."""
    for cls in type(instance).__mro__:
        if hook in vars(cls):
            return not cls.__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))
    return False
