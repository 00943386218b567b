"""The state in a snapshot, decoded: its tensors in memory, or as outlines that are filled in a file later."""

import ctypes
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lazysnap.errors import FormatError
from lazysnap.shard.limits import with_stack
from lazysnap.shard.manifest import TAG
from lazysnap.snapshots.assembly import JoinedTensor, WholeSnapshot
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import into, room_for
from lazysnap.state.codec import array_tensor_names, decode, tensor_names

Choose = Callable[[Any], Any]
"""A function that returns a part of an encoded state."""


def parts_of(names: Collection[str] | None) -> Choose:
    """Return a function that chooses these objects of the state (``None``: all). Registered types stay encoded."""

    def choose(encoded: Any) -> dict[str, Any]:
        if not isinstance(encoded, dict):
            raise FormatError(f"the small state is {type(encoded).__name__}, expected a dict")
        return {name: unregistered(part) for name, part in encoded.items() if names is None or name in names}

    return choose


def unregistered(encoded: Any) -> Any:
    """Return an encoded value in which values of registered types are replaced by what their encoder returned."""
    if isinstance(encoded, list):
        return [unregistered(item) for item in encoded]
    if not isinstance(encoded, Mapping):
        return encoded
    if encoded.get(TAG) == "registered":
        return unregistered(encoded.get("v"))
    return {key: unregistered(item) for key, item in encoded.items()}


def read_state(whole: WholeSnapshot, choose: Choose) -> dict[str, Any]:
    """Return the part of the state that ``choose`` returns, its tensors read and verified; tied ones are one tensor.

    Blocks. Raises: FormatError; LevelError; what ``choose`` raises.
    """
    with whole.snapshot.naming():
        encoded = with_stack(lambda: choose(whole.meta.state))
        names = tensor_names(encoded)
    found = read_tensors({name: whole.tensor(name) for name in names})
    return _decoded(whole, encoded, found.__getitem__)


def _decoded(whole: WholeSnapshot, encoded: Any, tensor: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    with whole.snapshot.naming():
        state = decode(encoded, tensor=tensor)
        if not isinstance(state, dict):
            raise FormatError(f"the state is {type(state).__name__}, expected a dict")
    return state


def read_tensors(tensors: Mapping[str, JoinedTensor]) -> dict[str, torch.Tensor]:
    """Return tensors in memory, tied ones once. Blocks. Raises: FormatError; LevelError."""
    reads, made = Reads(), {}
    keys = {name: tensor.key for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if keys[name] not in made:
            made[keys[name]] = room_for(tensor)
            reads.add(tensor, into(made[keys[name]]))
    reads.run()
    return {name: made[key] for name, key in keys.items()}


class Outline:
    """A state whose tensors have dtype and shape, and no memory: it can be larger than memory is."""

    def __init__(self, whole: WholeSnapshot) -> None:
        self._whole = whole
        self._mode = FakeTensorMode()
        self._made: dict[object, torch.Tensor] = {}
        self._sources: dict[int, JoinedTensor] = {}
        """The tensors that outlines stand for, by ``identity_of`` the outline's memory."""

    def state(self, choose: Choose) -> dict[str, Any]:
        """Return the part of the state that ``choose`` returns. Blocks. Raises: FormatError."""
        with self._whole.snapshot.naming():
            encoded = with_stack(lambda: choose(self._whole.meta.state))
            names = array_tensor_names(encoded)
        # NumPy has no outlines: arrays are read.
        arrays = read_tensors({name: self._whole.tensor(name) for name in names})
        return _decoded(self._whole, encoded, lambda name: self._tensor(name, arrays))

    def _tensor(self, name: str, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        array = arrays.get(name)
        return self._outline(self._whole.tensor(name)) if array is None else array

    def _outline(self, tensor: JoinedTensor) -> torch.Tensor:
        if tensor.key not in self._made:
            with self._mode:
                made = self._made[tensor.key] = room_for(tensor, is_row_major=True)
            self._sources[identity_of(made.untyped_storage())] = tensor
        return self._made[tensor.key]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        return sum(tensor.size_bytes for tensor in self._sources.values())

    def source(self, value: Any) -> JoinedTensor | None:
        """Return the tensor of the snapshot that an outline stands for; ``None`` for any other value."""
        return self.source_of(value.untyped_storage()) if isinstance(value, torch.Tensor) else None

    def source_of(self, storage: torch.UntypedStorage) -> JoinedTensor | None:
        """Return the same as ``source`` for the memory of an outline."""
        return self._sources.get(identity_of(storage))

    def read(self, value: Any) -> Any:
        """Return a value with tensors in memory in place of outlines. Blocks. Raises: FormatError; LevelError."""
        leaves = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
        wanted = {str(id(one)): source for one in leaves if (source := self.source(one)) is not None}
        found = read_tensors(wanted)
        return tree_map_only(torch.Tensor, lambda one: found.get(str(id(one)), one), value)


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all objects of one memory."""
    return int(storage._cdata)


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a tensor on the CPU. It is valid as long as the tensor lives."""
    size = storage.nbytes()
    return memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B") if size else memoryview(b"")
