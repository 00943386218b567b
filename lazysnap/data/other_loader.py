"""Training data that come from no ``DataLoader`` of torch: iterated in place, and replayed after a restart."""

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lazysnap.data.position import Position, make_resumable

logger = logging.getLogger(__name__)


class OtherLoader:
    """Any object that can be iterated and gives batches; its attributes are those of that object.

    ``position`` counts batches. After a restart the object is iterated anew, with the random generators as they were
    then, and the batches that were trained are read and dropped.
    """

    def __init__(self, loader: Any) -> None:
        self._dataloader = loader
        self.position = Position(self)

    def __iter__(self) -> Iterator[Any]:
        return self.position.iterate(lambda: iter(self._dataloader))

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def with_position(loader: Any) -> tuple[Any, Position]:
    """Return what to iterate instead of ``loader``, and its position: ``loader`` itself, if it is a ``DataLoader``.

    Of anything else a warning says what a restart cannot restore.
    """
    if isinstance(loader, DataLoader):
        return loader, make_resumable(loader)
    logger.warning(
        "the training data come from a %s, which is no torch.utils.data.DataLoader: a restart iterates it anew and "
        "drops the batches that were trained. What it counts or keeps for itself beside random generators is lost "
        "then, and the batches are the same only if their order does not depend on that; use a DataLoader to make sure",
        type(loader).__qualname__,
    )
    other = OtherLoader(loader)
    return other, other.position
