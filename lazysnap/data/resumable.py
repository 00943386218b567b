"""Loaders with a position: ``ResumableLoader``, a ``DataLoader`` in place, or any other loader."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lazysnap.data.parts import attributes_of
from lazysnap.data.position import Position
from lazysnap.errors import ConfigError

logger = logging.getLogger(__name__)


class ResumableLoader:
    """A data loader whose position is state: add it to the state of the engine, and iterate it.

    ::

        loader = ResumableLoader(DataLoader(dataset, shuffle=True))
        engine = SnapshotEngine("runs/a", {"model": model, "optimizer": optimizer, "loader": loader})

    After a restore its next iteration continues after the last batch that was trained, in the same order and with the
    same random numbers. If the epoch was at its end, that iteration is empty. Everything else is forwarded to the
    loader.
    Limits: see ``lazysnap.data.position``.
    """

    is_data_position = True

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        """The loader itself."""
        self.position = Position(loader)
        """The position in its data."""

    def __iter__(self) -> Iterator[Any]:
        return self.position.iterate(lambda: iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "position"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the current position."""
        return self.position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at ``state``."""
        self.position.load_state_dict(state)


def with_position(loader: Any) -> tuple[Any, Position]:
    """Return a loader to iterate instead of ``loader``, and its position: ``loader`` itself if it is a ``DataLoader``.

    Any other loader is iterated again after a restart, with the earlier random generators, and the trained batches are
    dropped. A warning names what a restart cannot restore.
    """
    if isinstance(loader, DataLoader):
        return loader, make_resumable(loader)
    logger.warning(
        "the training data come from a %s, which is no torch.utils.data.DataLoader: a restart iterates it again and "
        "drops the batches that were trained. Counters and other state, except random generators, are lost "
        "then, and the batches are the same only if their order does not depend on that; use a DataLoader to make sure",
        type(loader).__qualname__,
    )
    resumable = ResumableLoader(loader)
    return resumable, resumable.position


def make_resumable(loader: Any) -> Position:
    """Let iterations of ``loader`` be recorded and resumed, in place: it stays the same object. Idempotent.

    For a ``DataLoader``, also one that Accelerate prepared. Raises: ConfigError, for anything else.
    """
    position = attributes_of(loader).get("_lazysnap_position")
    if isinstance(position, Position):
        return position
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"a torch.utils.data.DataLoader is needed, got {type(loader).__qualname__}")
    # Accelerate's loaders pretend to be of torch's class, with a read-only property.
    object.__dict__["__class__"].__set__(loader, _resumable(type(loader)))  # type: ignore[arg-type]
    position = Position(loader, is_owned=True)
    loader._lazysnap_position = position
    return position


@functools.cache
def _resumable(kind: type) -> type:
    """A subclass of a loader's class whose iterations are recorded by the loader's position."""

    def __iter__(self: Any) -> Iterator[Any]:
        return self._lazysnap_position.iterate(lambda: kind.__iter__(self))  # type: ignore[no-any-return,attr-defined]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle or copy as the original loader: the position belongs only to this one."""
        stock: Any = object.__new__(kind)
        stock.__dict__.update({name: value for name, value in vars(self).items() if name != "_lazysnap_position"})
        return stock.__reduce_ex__(protocol)

    methods = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), methods)
