"""``ResumableLoader``: any data loader with its position in the epoch as part of the training state."""

from collections.abc import Iterator
from typing import Any

from lazysnap.data.position import Position
from lazysnap.errors import ConfigError


class Recorded:
    """The iterations of ``loader``, recorded by a position."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        """The loader itself."""
        self.position = Position(loader)
        """The position in its data."""

    def __iter__(self) -> Iterator[Any]:
        return self.position.iterate(lambda: iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)


class ResumableLoader(Recorded):
    """A data loader whose position is state: give it to the engine beside model and optimizer, and iterate it.

    ::

        loader = ResumableLoader(DataLoader(dataset, shuffle=True))
        engine = SnapshotEngine("runs/a", {"model": model, "optimizer": optimizer, "loader": loader})

    After a restore its next iteration goes on behind the last batch that was trained, in the same order and with the
    same random numbers; of an epoch that was at its end nothing is left, and that iteration is empty. Everything else
    is the loader's own. Limits: see ``lazysnap.data.position``.
    Raises: ConfigError, for what cannot be iterated again and again.
    """

    is_data_position = True

    def __init__(self, loader: Any) -> None:
        if not hasattr(loader, "__iter__") or hasattr(loader, "__next__"):
            raise ConfigError(
                f"ResumableLoader: a data loader is needed, that begins anew at every iter(), got "
                f"{type(loader).__qualname__}"
            )
        super().__init__(loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "position"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the current position."""
        return self.position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at ``state``."""
        self.position.load_state_dict(state)
