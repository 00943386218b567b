"""The program's hooks for checkpoints, which every capture calls: one that is slow or writes files is named once."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lazysnap.config import PersistentLevel
from lazysnap.integrations.lightning.framework import overrides
from lazysnap.integrations.patches import Patches

logger = logging.getLogger(__name__)

_SLOW_S = 0.01
_MOST_FILES = 10_000
"""Files beyond which a directory is not searched for changes."""


class Hooks:
    """The hooks of one fit. Used on the training thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._levels: Sequence[PersistentLevel] = ()
        self._called: set[str] = set()
        self._slow: set[str] = set()

    def start(self, levels: Sequence[PersistentLevel]) -> None:
        """The fit begins; ``levels``: places whose files are no hook's."""
        self._levels, self._called, self._slow = levels, set(), set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, hooks for checkpoints that the program defines are watched."""
        trainer, patches = self._trainer, Patches()
        for owner in (*trainer.callbacks, trainer.lightning_module, trainer.datamodule):
            for name in ("state_dict", "on_save_checkpoint"):
                is_weights = name == "state_dict" and isinstance(owner, torch.nn.Module)
                if owner is not None and not is_weights and overrides(owner, name):
                    patches.replace(owner, name, partial(self._watch, f"{type(owner).__qualname__}.{name}"))
        try:
            yield
        finally:
            patches.undo()

    def _watch(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._files() if name not in self._called else None
        self._called.add(name)
        started = time.perf_counter()
        result = original(*args, **kwargs)
        seconds = time.perf_counter() - started
        if before is not None and (after := self._files()) is not None:
            changed = sorted(path for path, facts in after.items() if before.get(path) != facts)
            if changed:
                logger.warning(
                    "%s wrote %s: a snapshot calls it at every captured step, not only where Lightning saves a "
                    "checkpoint; let it write elsewhere, or raise every_n_steps",
                    name,
                    changed[0],
                )
        if seconds > _SLOW_S and name not in self._slow:
            self._slow.add(name)
            logger.warning(
                "%s took %.0f ms, and training waits for it at every captured step: make it faster, or raise "
                "every_n_steps",
                name,
                seconds * 1e3,
            )
        return result

    def _files(self) -> dict[str, tuple[int, int]] | None:
        """Times and sizes of the files under the run's directory, without the levels; ``None``, if there are many."""
        root = str(self._trainer.default_root_dir)
        if "://" in root or not os.path.isdir(root):
            return None
        apart = {os.path.abspath(level.url) for level in self._levels}
        found: dict[str, tuple[int, int]] = {}
        for directory, names, files in os.walk(root):
            names[:] = [name for name in names if os.path.abspath(os.path.join(directory, name)) not in apart]
            for name in files:
                path = Path(directory, name)
                with contextlib.suppress(OSError):
                    facts = path.stat()
                    found[str(path)] = (facts.st_mtime_ns, facts.st_size)
            if len(found) > _MOST_FILES:
                return None
        return found
