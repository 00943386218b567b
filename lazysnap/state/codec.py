"""The encoding of small state as JSON: a closed set of tagged types, tensors by name.

``None``, ``bool``, ``str``, integers below 2**53, finite floats, lists, and dicts with string keys are plain JSON.
Every other value is ``{"$": tag, "v": …}``. Decoding imports nothing by name and runs no code except the decoders that
this process gave to ``register_type``. The table of tags is in docs/format.md.
"""

import argparse
import base64
import datetime
import decimal
import math
import pathlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from lazysnap.errors import FormatError, StateError
from lazysnap.shard.limits import MAX_STATE_DEPTH, with_stack
from lazysnap.shard.manifest import TAG

TensorSink = Callable[[torch.Tensor, tuple[Any, ...]], str]
TensorSource = Callable[[str], Any]

_EXACT_INT = 1 << 53
_ARRAY_BYTES = 64 << 10
"""NumPy arrays of this size and more are tensors of the shard. Smaller ones are text, which costs less than a tensor of
its own."""
_TORCH_KINDS = "biuf"
"""Kinds of NumPy dtypes that torch has, up to 8 bytes an element."""
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_PATH_SHOWN = 6
"""Keys of a path in an error."""
_KEY_SHOWN = 60
"""Characters of such a key, if it is no identifier."""
_registered: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_decoders: dict[str, Callable[[Any], Any]] = {}


def register_type(cls: type, *, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Add a type to the encoding: ``encode`` returns values of known types, ``decode`` receives them.

    ``name`` is part of the snapshot: never change it. Register before the first boundary and before a restore.
    Raises: ValueError, if another type has that name.
    """
    owner = next((known for known, (taken, _) in _registered.items() if taken == name and known is not cls), None)
    if owner is not None:
        raise ValueError(f"register_type: the name {name!r} belongs to {owner.__qualname__}")
    _registered[cls] = (name, encode)
    _decoders[name] = decode


def path_text(path: Collection[Any]) -> str:
    """Return a path in the state for messages: ``$.callbacks['EMA'].weights[3]``."""
    text = "$"
    for key in path:
        shown = repr(key)
        if len(shown) > _KEY_SHOWN:
            shown = f"{shown[:_KEY_SHOWN]}…"
        text += f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{shown}]"
    return text


def encode(value: Any, *, tensor: TensorSink) -> Any:
    """Return ``value`` as plain JSON values; ``tensor(tensor, path)`` receives each tensor and returns its name.

    Raises: StateError, with the path of the first value that has an unknown type or is nested more than
    ``MAX_STATE_DEPTH`` deep. RecursionError, if the stack is too small for that (``with_stack``).
    """
    return Encoder(tensor).any(value)


def is_known(value: Any) -> bool:
    """True if ``encode`` knows the type of ``value``, and the types of all that it contains."""
    if type(value) in _PLAIN or isinstance(value, (torch.Tensor, pathlib.PurePath)):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _is_plain_numpy(value, numpy)
    try:
        encode(value, tensor=lambda tensor, path: "")
    except StateError:
        return False
    return True


class Encoder:
    """Encodes one value: see ``encode``. ``path`` is the place of the value that it is at."""

    def __init__(self, tensor: TensorSink) -> None:
        self.tensor = tensor
        self._depth = 0
        self.path: list[Any] = []
        self.table: dict[type, Callable[[Any], Any]] = {
            type(None): _same,
            bool: _same,
            str: _same,
            int: lambda value: value if -_EXACT_INT < value < _EXACT_INT else {TAG: "int", "v": str(value)},
            float: lambda value: value if math.isfinite(value) else {TAG: "float", "v": repr(value)},
            dict: self._dict,
            list: self._list,
            tuple: lambda value: {TAG: "tuple", "v": self._list(value)},
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            OrderedDict: lambda value: {TAG: "OrderedDict", "v": self._pairs(value)},
            Counter: lambda value: {TAG: "Counter", "v": self._pairs(value)},
            defaultdict: self._defaultdict,
            deque: lambda value: {TAG: "deque", "v": self._list(value), "maxlen": value.maxlen},
            set: lambda value: {TAG: "set", "v": self._unordered(value)},
            frozenset: lambda value: {TAG: "frozenset", "v": self._unordered(value)},
            argparse.Namespace: lambda value: {TAG: "Namespace", "v": self._pairs(vars(value))},
            types.SimpleNamespace: lambda value: {TAG: "SimpleNamespace", "v": self._pairs(vars(value))},
            **_LEAF_ENCODERS,
        }

    def any(self, value: Any) -> Any:
        """Return an encoded value of any type."""
        function = self.table.get(type(value))
        return function(value) if function else self._other(value)

    def _enter(self) -> None:
        """Enter a container; the caller decrements ``depth`` at its end."""
        self._depth += 1
        if self._depth > MAX_STATE_DEPTH:
            where = path_text(self.path[:_PATH_SHOWN])
            raise StateError(
                f"{where}…: nested more than {MAX_STATE_DEPTH} deep, or it contains itself; "
                "no snapshot can hold that. Store it flat, such as a list of parts, or keep it out of the state"
            )

    def _items(self, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return the items of a container encoded; ``pairs``: each with its key, or its number."""
        self._enter()
        found = []
        path, table = self.path, self.table
        for key, item in pairs:
            path.append(key)
            function = table.get(type(item))
            found.append(function(item) if function else self._other(item))
            path.pop()
        self._depth -= 1
        return found

    def _tensor(self, value: torch.Tensor) -> dict[str, str]:
        return {TAG: "tensor", "v": self.tensor(value, tuple(self.path))}

    def _dict(self, value: dict[Any, Any]) -> Any:
        if not set(map(type, value)) <= {str} or TAG in value:
            return {TAG: "dict", "v": self._pairs(value)}
        return dict(zip(value, self._items(value.items()), strict=True))

    def _list(self, value: Collection[Any]) -> list[Any]:
        # A fast path for long lists of integers, such as the state of Python's generator.
        if set(map(type, value)) == {int} and min(value) > -_EXACT_INT and max(value) < _EXACT_INT:
            self._enter()
            self._depth -= 1
            return list(value)
        return self._items(enumerate(value))

    def _pairs(self, value: Mapping[Any, Any]) -> list[Any]:
        keys = self._items((key, key) for key in value)
        return [list(pair) for pair in zip(keys, self._items(value.items()), strict=True)]

    def _unordered(self, value: Collection[Any]) -> list[Any]:
        # The order of a set differs between processes; equal states must give equal bytes.
        return sorted(self._list(value), key=repr)

    def _defaultdict(self, value: "defaultdict[Any, Any]") -> Any:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORY_NAMES:
            return self._unknown(f"defaultdict with the factory {factory!r}")
        name = _FACTORY_NAMES[factory] if factory is not None else None
        return {TAG: "defaultdict", "v": self._pairs(value), "factory": name}

    def _other(self, value: Any) -> Any:
        kind = type(value)
        if kind in _registered:
            name, function = _registered[kind]
            self._enter()
            encoded = self.any(function(value))
            self._depth -= 1
            return {TAG: "registered", "n": name, "v": encoded}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic, numpy.dtype)):
            encoded = self._numpy(value, numpy)
            if encoded is not None:
                return encoded
        if isinstance(value, pathlib.PurePath):
            return {TAG: "Path", "v": str(value)}
        return self._unknown(f"{kind.__module__}.{kind.__qualname__}")

    def _numpy(self, value: Any, numpy: Any) -> Any:
        """Return a NumPy value encoded; ``None`` if it is of an unknown kind."""
        if isinstance(value, numpy.dtype):
            return None if value.hasobject or value.names else {TAG: "np.dtype", "v": value.str}
        if not _is_plain_numpy(value, numpy):
            return None
        facts = {"dtype": value.dtype.str, "shape": list(value.shape)}
        if not isinstance(value, numpy.ndarray):
            return {TAG: "npscalar", **facts, "v": _text64(value.tobytes())}
        if value.nbytes < _ARRAY_BYTES:
            return {TAG: "ndarray", **facts, "v": _text64(value.tobytes())}
        return {TAG: "array", **facts, "v": self._tensor(_as_tensor(value, numpy))}

    def _unknown(self, what: str) -> NoReturn:
        raise StateError(
            f"{path_text(self.path)}: {what}: the safe encoding does not know this type, and a resume needs the value; "
            "add it with lazysnap.register_type(cls, name=..., encode=..., decode=...), or keep it out of the state"
        )


def _same(value: Any) -> Any:
    return value


def _text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_plain_numpy(value: Any, numpy: Any) -> bool:
    """True if dtype, shape and bytes say all about an array or a scalar."""
    dtype = value.dtype
    if dtype.hasobject or dtype.names or numpy.dtype(dtype.str) != dtype:
        return False
    # A masked array has a mask besides.
    return not isinstance(value, numpy.ndarray) or type(value) in (numpy.ndarray, numpy.memmap)


def _as_tensor(array: Any, numpy: Any) -> torch.Tensor:
    """Return a tensor over the memory of ``array``, or over a copy where torch cannot use that: of the same dtype if
    torch has it, else of its bytes."""
    array = numpy.asarray(array, order="C")
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory that it must not write to
    dtype = array.dtype
    if not dtype.isnative or dtype.kind not in _TORCH_KINDS or dtype.itemsize > 8:
        array = array.reshape(-1).view(numpy.uint8)
    return torch.from_numpy(array)


_LEAF_ENCODERS: dict[type, Callable[[Any], Any]] = {
    complex: lambda value: {TAG: "complex", "v": [repr(value.real), repr(value.imag)]},
    bytes: lambda value: {TAG: "bytes", "v": _text64(value)},
    bytearray: lambda value: {TAG: "bytearray", "v": _text64(bytes(value))},
    range: lambda value: {TAG: "range", "v": [value.start, value.stop, value.step]},
    datetime.datetime: lambda value: {TAG: "datetime", "v": value.isoformat()},
    datetime.date: lambda value: {TAG: "date", "v": value.isoformat()},
    datetime.timedelta: lambda value: {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]},
    decimal.Decimal: lambda value: {TAG: "Decimal", "v": str(value)},
    torch.Size: lambda value: {TAG: "torch.Size", "v": list(value)},
    torch.dtype: lambda value: {TAG: "torch.dtype", "v": str(value).removeprefix("torch.")},
    torch.device: lambda value: {TAG: "torch.device", "v": str(value)},
    torch.layout: lambda value: {TAG: "torch.layout", "v": str(value).removeprefix("torch.")},
    torch.memory_format: lambda value: {TAG: "torch.memory_format", "v": str(value).removeprefix("torch.")},
}


_PLAIN = {type(None), bool, str, int, float, *_LEAF_ENCODERS}
"""Types of values that contain no others."""


def decode(encoded: Any, *, tensor: TensorSource) -> Any:
    """Return the value that was encoded; ``tensor(name)`` returns each tensor, or what stands for it.

    Raises: FormatError, if it is no encoding, or nested more than ``MAX_STATE_DEPTH`` deep; StateError, if a
    type is not registered in this process.
    """
    try:
        return with_stack(lambda: _Decoder(tensor).any(encoded))
    # SyntaxError: NumPy parses the names of dtypes.
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, SyntaxError) as error:
        if isinstance(error, (FormatError, StateError)):
            raise
        raise FormatError(f"the small state is no valid encoding: {type(error).__name__}: {error}") from error


def tensor_names(encoded: Any) -> list[str]:
    """Return the names of all tensors in an encoding, in order. Calls no registered decoder. Raises: FormatError."""
    return [_str(item.get("v")) for item in _tagged(encoded) if item[TAG] == "tensor"]


def registered_names(encoded: Any) -> set[str]:
    """Return the names of all registered types in an encoding."""
    return {str(item.get("n")) for item in _tagged(encoded) if item[TAG] == "registered"}


def _tagged(encoded: Any) -> Iterator[dict[str, Any]]:
    """Yield all tagged values in an encoding, in order, the outer ones first."""
    left = [encoded]
    while left:
        item = left.pop()
        if type(item) is list:
            left += reversed(item)
        elif type(item) is dict:
            if TAG in item:
                yield item
            if item.get(TAG) != "tensor":
                left += reversed(item.values())


class _Decoder:
    def __init__(self, tensor: TensorSource) -> None:
        self.tensor = tensor
        self.depth = 0
        self.tags: dict[str, Callable[[dict[str, Any]], Any]] = {
            "tensor": lambda item: self.tensor(_str(item["v"])),
            "array": self.array,
            "tuple": lambda item: tuple(self.list_(item["v"])),
            "set": lambda item: set(self.list_(item["v"])),
            "frozenset": lambda item: frozenset(self.list_(item["v"])),
            "dict": lambda item: dict(self.pairs(item["v"])),
            "OrderedDict": lambda item: OrderedDict(self.pairs(item["v"])),
            "Counter": lambda item: Counter(dict(self.pairs(item["v"]))),
            "defaultdict": lambda item: defaultdict(
                None if item["factory"] is None else _FACTORIES[item["factory"]], self.pairs(item["v"])
            ),
            "deque": lambda item: deque(self.list_(item["v"]), item["maxlen"]),
            "Namespace": lambda item: argparse.Namespace(**dict(self.pairs(item["v"]))),
            "SimpleNamespace": lambda item: types.SimpleNamespace(**dict(self.pairs(item["v"]))),
            "registered": self.registered,
            **_LEAF_DECODERS,
        }

    def enter(self) -> None:
        """Like ``Encoder._enter``."""
        self.depth += 1
        if self.depth > MAX_STATE_DEPTH:
            raise FormatError(f"the small state is nested more than {MAX_STATE_DEPTH} deep")

    def any(self, item: Any) -> Any:
        if type(item) is dict:
            if TAG in item:
                tag = item[TAG]
                if tag not in self.tags:
                    raise FormatError(f"the small state has an unknown tag {tag!r:.50}")
                return self.tags[tag](item)
            self.enter()
            result = {key: self.any(value) for key, value in item.items()}
            self.depth -= 1
            return result
        if type(item) is list:
            return self.list_(item)
        return item

    def list_(self, items: Any) -> list[Any]:
        if type(items) is not list:
            raise FormatError(f"the small state has {type(items).__name__} where a list must be")
        self.enter()
        result = [self.any(item) for item in items]
        self.depth -= 1
        return result

    def pairs(self, items: Any) -> list[tuple[Any, Any]]:
        self.enter()
        result = [(self.any(key), self.any(value)) for key, value in items]
        self.depth -= 1
        return result

    def array(self, item: dict[str, Any]) -> Any:
        tensor = self.any(item["v"])
        if not isinstance(tensor, torch.Tensor):
            raise FormatError("the small state has an array without a tensor")
        dtype = _numpy_dtype(item["dtype"])
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        # A copy: the tensor's memory is not the program's.
        return flat.numpy().view(dtype).reshape(item["shape"]).copy()

    def registered(self, item: dict[str, Any]) -> Any:
        name = item["n"]
        if name not in _decoders:
            raise StateError(
                f"the snapshot holds a value of the registered type {name!r}, which is not registered in this "
                "process; call lazysnap.register_type(..., name=...) before the restore"
            )
        self.enter()
        value = self.any(item["v"])
        self.depth -= 1
        return _decoders[name](value)


def _str(value: Any) -> str:
    if type(value) is not str:
        raise FormatError(f"the small state has {type(value).__name__} where a name must be")
    return value


def _numpy_dtype(name: Any) -> Any:
    import numpy  # only where a snapshot holds such values

    dtype = numpy.dtype(_str(name))
    if dtype.hasobject:
        raise FormatError("the small state has an array of Python objects")
    return dtype


def _decode_numpy(item: dict[str, Any]) -> Any:
    import numpy  # only where a snapshot holds such values

    if item[TAG] == "np.dtype":
        return numpy.dtype(_str(item["v"]))
    dtype = _numpy_dtype(item["dtype"])
    array = numpy.frombuffer(base64.b64decode(item["v"], validate=True), dtype).reshape(item["shape"]).copy()
    return array if item[TAG] == "ndarray" else array[()]


def _torch_constant(kind: type) -> Callable[[dict[str, Any]], Any]:
    def lookup(item: dict[str, Any]) -> Any:
        value = getattr(torch, _str(item["v"]), None)
        if not isinstance(value, kind):
            raise FormatError(f"torch has no {kind.__name__} called {item['v']!r:.50}")
        return value

    return lookup


_LEAF_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda item: int(_str(item["v"])),
    "float": lambda item: float(_str(item["v"])),
    "complex": lambda item: complex(*(float(_str(part)) for part in item["v"])),
    "bytes": lambda item: base64.b64decode(item["v"], validate=True),
    "bytearray": lambda item: bytearray(base64.b64decode(item["v"], validate=True)),
    "range": lambda item: range(*item["v"]),
    "Path": lambda item: pathlib.Path(_str(item["v"])),
    "datetime": lambda item: datetime.datetime.fromisoformat(item["v"]),
    "date": lambda item: datetime.date.fromisoformat(item["v"]),
    "timedelta": lambda item: datetime.timedelta(*item["v"]),
    "Decimal": lambda item: decimal.Decimal(_str(item["v"])),
    "ndarray": _decode_numpy,
    "npscalar": _decode_numpy,
    "np.dtype": _decode_numpy,
    "torch.Size": lambda item: torch.Size(item["v"]),
    "torch.dtype": _torch_constant(torch.dtype),
    "torch.device": lambda item: torch.device(_str(item["v"])),
    "torch.layout": _torch_constant(torch.layout),
    "torch.memory_format": _torch_constant(torch.memory_format),
}
