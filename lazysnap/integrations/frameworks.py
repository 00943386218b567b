"""Helpers for frameworks: checks that one is installed, ``attach``, temporary replacement of methods."""

import os
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

from lazysnap.config import KeepBest, SnapshotConfig
from lazysnap.errors import ConfigError

_MISSING = object()


def is_installed(package: str) -> bool:
    """True if ``package`` can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or a test replaced it with None
        return False


def require(integration: str, framework: str, extra: str, *packages: str) -> None:
    """Check for a framework before any other import, so that the error names it, and not one of its dependencies.

    Args:
        integration: the class that needs the framework, for the message.
        framework: its name, for the message.
        extra: the extra of this package that installs it.
        packages: one of these suffices.

    Raises: ModuleNotFoundError, if none of ``packages`` is installed.
    """
    if any(map(is_installed, packages)):
        return
    searched = ""
    if len(packages) > 1:
        searched = f" (neither {' nor '.join(packages)})"
    raise ModuleNotFoundError(
        f"{integration} needs {framework}, which is not installed here{searched}: run "
        f'`pip install "lazysnap[{extra}]"`',
        name=packages[0],
    )


def attach(
    target: Any,
    snapshots: "str | os.PathLike[str] | SnapshotConfig | None" = None,
    *,
    keep_best: KeepBest | None = None,
) -> Any:
    """Add snapshots to an object of a framework, in place, and return it. A second call without settings does nothing::

        lazysnap.attach(trainer)
        trainer.train(resume_from_checkpoint="latest")

    Args:
        target: an ``accelerate.Accelerator``, which gets the methods of a ``LazyAccelerator``; or a
            ``transformers.Trainer`` (also of TRL), which gets a ``LazyTrainerCallback``.
        snapshots: a path or URL, or a ``SnapshotConfig``; by default ``<project_dir>/lazysnap``, else
            ``./lazysnap``, or ``<output_dir>/_lazysnap``.
        keep_best: keeps the best snapshots by a metric of a Trainer's evaluations. With an Accelerator, call
            ``accelerator.engine.keep_best``.

    Raises: ConfigError, for anything else, for a second call with other settings, and as ``LazyAccelerator`` and
    ``LazyTrainerCallback``.
    """
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(target).__mro__}
    if "accelerate.Accelerator" in names:
        from lazysnap.integrations.accelerate import attach_accelerator

        if keep_best is not None:
            raise ConfigError("attach: an Accelerator knows no metric: call accelerator.engine.keep_best(name, value)")
        return attach_accelerator(target, snapshots)
    if "transformers.Trainer" in names:
        from lazysnap.integrations.transformers import attach_trainer

        attach_trainer(target, snapshots, keep_best)
        return target
    raise ConfigError(
        f"attach: an accelerate.Accelerator or a transformers.Trainer is needed, got {type(target).__qualname__}; for "
        "Lightning use LazySnapshotCallback, for a plain loop SnapshotEngine"
    )


class Patches:
    """A stack of temporarily replaced methods and functions. Classes are never changed.

    A replaced function of a module affects all its callers in the process: the replacement must check the caller.
    """

    def __init__(self, is_on: Callable[[], bool] | None = None) -> None:
        """``is_on``: called at each call of a replaced method; if it returns ``False``, only the original runs."""
        self._is_on = is_on
        self._stack: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace ``owner.name(...)`` by ``replacement(original, ...)``."""
        original = getattr(owner, name)

        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if self._is_on is not None and not self._is_on():
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        self._stack.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, method)

    def undo(self) -> None:
        """Restore everything, last first. Idempotent."""
        while self._stack:
            owner, name, before = self._stack.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
