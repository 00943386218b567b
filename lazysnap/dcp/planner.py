"""DCP's load planner, for values without pickling and with their original keys."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem


class SnapshotLoadPlanner(DefaultLoadPlanner):
    """``DefaultLoadPlanner`` for ``SnapshotReader``; optional.

    Values that are no tensors are loaded without ``torch.save`` and ``torch.load``. Values under integer keys
    (``optimizer.state_dict()``, ``Counter``) are replaced, where the default planner adds text keys.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See ``DefaultLoadPlanner``."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.places: dict[str, tuple[Any, Any]] = {}
        """By flat key: the container, and the key in it."""
        if self.flatten_state_dict:
            self._find_places("", state_dict)

    def _find_places(self, prefix: str, container: Any) -> None:
        pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, value in pairs:
            flat = f"{prefix}{key}"
            if isinstance(value, (Mapping, list)) and flat not in self.mappings:
                self._find_places(f"{flat}.", value)
            else:
                self.places.setdefault(flat, (container, key))


def load_value(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Load a value that is no tensor, through any planner: those of DCP expect bytes of ``torch.save``."""
    places = planner.places if isinstance(planner, SnapshotLoadPlanner) else {}
    if item.dest_index.fqn in places:
        container, key = places[item.dest_index.fqn]
        container[key] = value
        return
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    planner.load_bytes(item, data)
