"""The program's hooks for checkpoints, which every capture calls: their time and files, and a rest for slow ones.

A hook is slow if it takes over 10 ms. One that gave the same twice in a row, and changed nothing else of the
checkpoint, is called at steps that a level stores alone; between them its last entry stands in. That entry is older
than its step: the snapshot says so, and a hook whose entry turns out to have changed is called at every capture again.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lazysnap.config import PersistentLevel
from lazysnap.errors import UnsupportedState
from lazysnap.integrations.lightning.framework import overrides
from lazysnap.integrations.patches import Patches
from lazysnap.levels.redaction import shown
from lazysnap.state.codec import decode, encode

logger = logging.getLogger(__name__)

_SLOW_S = 0.01
_MOST_FILES = 10_000
"""Files beyond which a directory is not searched for changes."""


@dataclass
class _Hook:
    """The record of one hook."""

    name: str
    calls: int = 0
    is_slow: bool = False
    entry: str | None = None
    """The last entry, encoded; ``None``, if it cannot stand in."""
    step: int = 0
    """The step of the last call."""
    rests: bool = False
    """True if the last entry stands in until a level stores a step."""
    stood_in: list[int] = field(default_factory=list)
    """First and last step since the last call that have an older entry."""
    changes: bool = False
    """True if an entry had changed after it stood in."""


class Hooks:
    """The hooks of one fit. Used on the training thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._levels: Sequence[PersistentLevel] = ()
        self._known: dict[str, _Hook] = {}
        self.calls_all = False
        """True at the last step of a fit: no older entry stands in."""
        self.older: dict[str, int] = {}
        """Steps by hook: that of its entry in the last collected state, where that is an older one."""

    def start(self, levels: Sequence[PersistentLevel]) -> None:
        """The fit begins; ``levels``: the steps that they store."""
        self._levels, self._known = levels, {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, hooks for checkpoints that the program defines are watched."""
        trainer, patches = self._trainer, Patches()
        self.older = {}
        owners = [*trainer.callbacks, trainer.lightning_module, trainer.datamodule]
        for number, owner in enumerate(owners):
            for name, call in (("state_dict", self._state_dict), ("on_save_checkpoint", self._on_save_checkpoint)):
                is_weights = name == "state_dict" and isinstance(owner, torch.nn.Module)
                if owner is not None and not is_weights and overrides(owner, name):
                    hook = self._known.setdefault(f"{number}.{name}", _Hook(f"{type(owner).__qualname__}.{name}"))
                    patches.replace(owner, name, self._bound(call, hook))
        try:
            yield
        finally:
            patches.undo()

    def _bound(self, call: Callable[..., Any], hook: _Hook) -> Callable[..., Any]:
        return lambda original, *args, **kwargs: call(hook, original, *args, **kwargs)

    # ---------------------------------------------------------------- one hook

    def _state_dict(self, hook: _Hook, original: Callable[[], Any]) -> Any:
        if self._stands_in(hook):
            return _decoded(hook.entry)
        result = self._timed(hook, original)
        if hook.is_slow:
            self._note(hook, _encoded(result))
        return result

    def _on_save_checkpoint(self, hook: _Hook, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        checkpoint = args[-1] if args else kwargs["checkpoint"]
        if self._stands_in(hook):
            checkpoint.update(_decoded(hook.entry))
            return
        known, before = set(checkpoint), _outline(checkpoint) if hook.is_slow else None
        self._timed(hook, original, *args, **kwargs)
        if hook.is_slow:
            old = {name: value for name, value in checkpoint.items() if name in known}
            only_adds = before is not None and _outline(old) == before
            added = {name: value for name, value in checkpoint.items() if name not in known}
            self._note(hook, _encoded(added) if only_adds else None)

    def _stands_in(self, hook: _Hook) -> bool:
        step = self._trainer.global_step
        is_due = any(step // level.every_n_steps > hook.step // level.every_n_steps for level in self._levels)
        if not hook.rests or is_due or self.calls_all:
            return False
        self.older[hook.name] = hook.step
        hook.stood_in = [*hook.stood_in[:1], step]
        return True

    def _timed(self, hook: _Hook, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._files() if not hook.calls else None
        started = time.perf_counter()
        result = original(*args, **kwargs)
        seconds = time.perf_counter() - started
        hook.calls += 1
        hook.step = self._trainer.global_step
        if before is not None and (after := self._files()) is not None:
            changed = sorted(path for path, facts in after.items() if before.get(path) != facts)
            if changed:
                logger.warning(
                    "%s wrote %s: a snapshot calls it at every captured step, not only where Lightning saves a "
                    "checkpoint; let it write elsewhere, or raise every_n_steps",
                    hook.name,
                    changed[0],
                )
        if seconds > _SLOW_S and not hook.is_slow:
            hook.is_slow = True
            logger.warning(
                "%s took %.0f ms, and training waits for it at every captured step: make it faster, or raise "
                "every_n_steps. If it gives the same twice in a row it is called only at steps that a level stores; "
                "snapshots of steps between hold its last entry, which is older than their step",
                hook.name,
                seconds * 1e3,
            )
        return result

    def _note(self, hook: _Hook, entry: str | None) -> None:
        if hook.stood_in and entry != hook.entry:
            hook.changes = True
            logger.warning(
                "%s gives another entry than before, though it had given the same twice: snapshots of steps %d to %d "
                "hold the older one. It is called at every captured step from now on",
                hook.name,
                hook.stood_in[0],
                hook.stood_in[-1],
            )
        hook.rests = entry is not None and entry == hook.entry and not hook.changes
        hook.entry, hook.stood_in = entry, []

    # ---------------------------------------------------------------- files

    def _files(self) -> dict[str, tuple[int, int]] | None:
        """Times and sizes of the files under the run's directory, without the levels; ``None``, if there are many."""
        root = str(self._trainer.default_root_dir)
        if "://" in root or not os.path.isdir(root):
            return None
        apart = {os.path.abspath(shown(level.url)) for level in self._levels}
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


def _encoded(value: Any) -> str | None:
    """``value`` as text; ``None``, if it holds a tensor or a value of an unknown type."""
    try:
        return json.dumps(encode(value, tensor=_refuse))
    except UnsupportedState:
        return None


def _decoded(text: str | None) -> Any:
    return decode(json.loads(text or "null"), tensor=lambda name: torch.empty(0))


def _outline(checkpoint: dict[str, Any]) -> str | None:
    """Everything in a checkpoint as text, tensors by their identity; ``None``, if it has values of unknown types."""
    try:
        return json.dumps(encode(dict(checkpoint), tensor=lambda tensor, path: str(id(tensor))))
    except UnsupportedState:
        return None


def _refuse(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
    raise UnsupportedState("a tensor")
