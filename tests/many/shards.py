"""What the shards of several ranks hold at a level."""

import math
from collections import Counter
from typing import NamedTuple

from support.catalogue import inventory_of

from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.store import open_storage


class Piece(NamedTuple):
    """A part of a tensor that stands in a shard."""

    name: str
    at: tuple
    shape: tuple
    whole: tuple
    """The shape of all of the tensor."""
    scope: str | None

    @property
    def size(self):
        return math.prod(self.shape)


def pieces_of(url):
    """By rank, of the newest snapshot at that level."""
    storage = open_storage(str(url))
    entries = inventory_of(storage).entries
    newest = max(entry.step for entry in entries)
    found = {}
    for entry in (entry for entry in entries if entry.step == newest):
        place = FilePlace.of(storage, entry)
        shard, path = place.read_manifest().of(entry.rank), f"{storage.url}/{place.file_path}"
        with open(path, "rb") as file:
            file.seek(shard.offset)
            layout = shard.layout(file.read(shard.header_bytes), path)
        shapes = {spec.name: tuple(spec.shape) for spec in layout.specs}
        found[entry.rank] = [
            Piece(name, tuple(facts["offsets"]), shapes[name], tuple(facts["global_shape"]), facts.get("scope"))
            for name, facts in shard.meta.tensors.items()
        ]
    return found


def of_scope(scope, pieces):
    """``full``: what all ranks hold alike; ``shard``: parts of DTensors."""
    return [piece for piece in pieces if piece.scope == scope]


def copies(pieces):
    """How often all of each tensor is there."""
    held, whole = Counter(), {}
    for piece in pieces:
        held[piece.name] += piece.size
        whole[piece.name] = math.prod(piece.whole)
    assert whole
    return {name: held[name] / whole[name] for name in whole}


def copies_at(url, *scopes):
    """The same, of all ranks; of those scopes, if some are named."""
    pieces = [piece for pieces in pieces_of(url).values() for piece in pieces]
    return copies([piece for piece in pieces if not scopes or piece.scope in scopes])
