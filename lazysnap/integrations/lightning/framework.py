"""Which Lightning is in use: ``lightning.pytorch`` and ``pytorch_lightning`` are the same code in different classes.

A ``Trainer`` takes callbacks of its own package only. Importing the other one as well would cost seconds, so the
callback gets its base classes from the packages that the program has imported.
"""

import sys
from importlib import import_module
from typing import Any

from lazysnap.integrations.installed import is_installed, require

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback_bases() -> tuple[type, ...]:
    """The ``Callback`` classes of the packages imported so far; of the installed one if none is.

    Raises: ModuleNotFoundError, if neither package is installed.
    """
    loaded = [name for name in _PACKAGES if hasattr(sys.modules.get(name), "Callback")]
    if not loaded:
        require("LazySnapshotCallback", "Lightning", "lightning", "lightning", "pytorch_lightning")
        loaded = [name for name in _PACKAGES if is_installed(name.split(".", 1)[0])][:1]
    return tuple(import_module(name).Callback for name in loaded)


def rebase(cls: type) -> None:
    """Let ``cls`` derive from the ``Callback`` classes of all packages imported by now."""
    wanted = callback_bases()
    if not all(issubclass(cls, base) for base in wanted):
        cls.__bases__ = wanted


def neighbour(instance: Any, name: str) -> Any:
    """The object ``name`` in the module that defines the class of ``instance``: private types of the same package."""
    return getattr(sys.modules[type(instance).__module__], name)


def overrides(instance: Any, hook: str) -> bool:
    """True if the program defines ``hook`` itself."""
    owner = next((cls for cls in type(instance).__mro__ if hook in vars(cls)), None)
    return owner is not None and not owner.__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))
