"""The encoding of small state as JSON: a closed set of tagged types, tensors by name.

``None``, ``bool``, ``str``, integers below 2**53, finite floats, lists, and dicts with string keys are plain JSON.
Every other value is ``{"$": tag, "v": …}``. Decoding imports nothing by name and runs only decoders that this process
gave to ``register_type``. docs/format.md has the table of tags.
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
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from lazysnap.errors import FormatError, StateError
from lazysnap.shard.limits import MAX_STATE_DEPTH, with_stack
from lazysnap.shard.manifest import TAG

TensorSink = Callable[[torch.Tensor, tuple[Any, ...]], str]
TensorSource = Callable[[str], Any]

_EXACT_INT = 1 << 53
_ARRAY_BYTES = 64 << 10
"""NumPy arrays of at least this size are tensors of the shard. Smaller ones are text, which costs less than a
tensor.
"""
_TORCH_KINDS = "biuf"
"""Kinds of NumPy dtypes that torch has, up to 8 bytes an element."""
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_PATH_SHOWN = 6
"""Maximum keys of a path in an error."""
_KEY_SHOWN = 60
"""Maximum characters of such a key, if it is no identifier."""
_registered: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_decoders: dict[str, Callable[[Any], Any]] = {}


class DecoderError(FormatError):
    """A decoder of the program raised: its code or this value is wrong."""


def register_type(cls: type, *, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Add a type to the encoding: ``encode`` returns values of known types, ``decode`` receives them.

    ``name`` is part of the snapshot: never change it. Register before the first boundary and before a restore.
    Raises: ValueError, if another type has that name.
    """
    for owner, (taken_name, _) in _registered.items():
        if taken_name == name and owner is not cls:
            raise ValueError(f"register_type: the name {name!r} belongs to {owner.__qualname__}")
    _registered[cls] = (name, encode)
    _decoders[name] = decode


def path_text(path: Collection[Any]) -> str:
    """Return a path in the state for messages: ``$.callbacks['EMA'].weights[3]``."""
    text = "$"
    for key in path:
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}"
            continue
        shown = repr(key)
        if len(shown) > _KEY_SHOWN:
            shown = f"{shown[:_KEY_SHOWN]}…"
        text += f"[{shown}]"
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
        encode(value, tensor=_no_name)
    except StateError:
        return False
    return True


def _no_name(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
    return ""


class Encoder:
    """Encodes one value: see ``encode``."""

    def __init__(self, tensor: TensorSink) -> None:
        self.tensor = tensor
        self._depth = 0
        self.path: list[Any] = []
        """The path of the value that is being encoded."""
        self.table: dict[type, Callable[[Any], Any]] = {
            type(None): _same,
            bool: _same,
            str: _same,
            int: _encode_int,
            float: _encode_float,
            dict: self._dict,
            list: self._list,
            tuple: partial(_tagged, "tuple", self._list),
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            OrderedDict: partial(_tagged, "OrderedDict", self._pairs),
            Counter: partial(_tagged, "Counter", self._pairs),
            defaultdict: self._defaultdict,
            deque: self._deque,
            set: partial(_tagged, "set", self._unordered),
            frozenset: partial(_tagged, "frozenset", self._unordered),
            argparse.Namespace: partial(_tagged, "Namespace", self._attributes),
            types.SimpleNamespace: partial(_tagged, "SimpleNamespace", self._attributes),
            **_LEAF_ENCODERS,
        }

    def any(self, value: Any) -> Any:
        """Return an encoded value of any type."""
        function = self.table.get(type(value), self._other)
        return function(value)

    def _enter(self) -> None:
        """Enter a container; the caller decrements ``_depth`` at its end."""
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
        encoded = []
        path = self.path
        table = self.table
        encode_other = self._other
        for key, item in pairs:
            path.append(key)
            function = table.get(type(item), encode_other)
            encoded.append(function(item))
            path.pop()
        self._depth -= 1
        return encoded

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
        items = self._items(value.items())
        return list(map(list, zip(keys, items, strict=True)))

    def _attributes(self, value: Any) -> list[Any]:
        return self._pairs(vars(value))

    def _deque(self, value: "deque[Any]") -> Any:
        return {TAG: "deque", "v": self._list(value), "maxlen": value.maxlen}

    def _unordered(self, value: Collection[Any]) -> list[Any]:
        # The order of a set differs between processes; equal states must give equal bytes.
        return sorted(self._list(value), key=repr)

    def _defaultdict(self, value: "defaultdict[Any, Any]") -> Any:
        factory = value.default_factory
        name = None
        if factory is not None:
            if factory not in _FACTORY_NAMES:
                return self._unknown(f"defaultdict with the factory {factory!r}")
            name = _FACTORY_NAMES[factory]
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
            if value.hasobject or value.names:
                return None
            return {TAG: "np.dtype", "v": value.str}
        if not _is_plain_numpy(value, numpy):
            return None
        facts = {"dtype": value.dtype.str, "shape": list(value.shape)}
        if not isinstance(value, numpy.ndarray):
            return {TAG: "npscalar", **facts, "v": _text64(value.tobytes())}
        if value.nbytes < _ARRAY_BYTES:
            return {TAG: "ndarray", **facts, "v": _text64(value.tobytes())}
        return {TAG: "array", **facts, "v": self._tensor(_as_tensor(value, numpy))}

    def _unknown(self, kind: str) -> NoReturn:
        raise StateError(
            f"{path_text(self.path)}: {kind}: the safe encoding does not know this type, and a resume needs the value; "
            "add it with lazysnap.register_type(cls, name=..., encode=..., decode=...), or keep it out of the state"
        )


def _same(value: Any) -> Any:
    return value


def _tagged(tag: str, encode_value: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {TAG: tag, "v": encode_value(value)}


def _encode_int(value: int) -> Any:
    if -_EXACT_INT < value < _EXACT_INT:
        return value
    return {TAG: "int", "v": str(value)}


def _encode_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {TAG: "float", "v": repr(value)}


def _text64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _bytes64(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _is_plain_numpy(value: Any, numpy: Any) -> bool:
    """True if dtype, shape and bytes describe an array or a scalar completely."""
    dtype = value.dtype
    if dtype.hasobject or dtype.names or numpy.dtype(dtype.str) != dtype:
        return False
    # A masked array also has a mask.
    return not isinstance(value, numpy.ndarray) or type(value) in (numpy.ndarray, numpy.memmap)


def _as_tensor(array: Any, numpy: Any) -> torch.Tensor:
    """Return a tensor over the memory of ``array``, or over a copy if torch cannot use that: of the same dtype if torch
    has it, else of its bytes.
    """
    array = numpy.asarray(array, order="C")
    if not array.flags.writeable:
        array = array.copy()  # torch warns about read-only memory
    dtype = array.dtype
    if not dtype.isnative or dtype.kind not in _TORCH_KINDS or dtype.itemsize > 8:
        array = array.reshape(-1).view(numpy.uint8)
    return torch.from_numpy(array)


def _complex_parts(value: complex) -> list[str]:
    return [repr(value.real), repr(value.imag)]


def _float_of(text: Any) -> float:
    return float(_str(text))


def _complex_of(parts: Any) -> complex:
    return complex(*map(_float_of, parts))


def _bytearray_of(text: Any) -> bytearray:
    return bytearray(_bytes64(text))


def _range_parts(value: range) -> list[int]:
    return [value.start, value.stop, value.step]


def _range_of(parts: Any) -> range:
    return range(*parts)


def _timedelta_parts(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _timedelta_of(parts: Any) -> datetime.timedelta:
    return datetime.timedelta(*parts)


def _decimal_of(text: Any) -> decimal.Decimal:
    return decimal.Decimal(_str(text))


def _device_of(text: Any) -> torch.device:
    return torch.device(_str(text))


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _torch_constant(kind: type, name: Any) -> Any:
    value = getattr(torch, _str(name), None)
    if not isinstance(value, kind):
        raise FormatError(f"torch has no {kind.__name__} called {name!r:.50}")
    return value


@dataclass(frozen=True)
class _Leaf:
    """The encoding of a type whose values contain no other values."""

    kind: type
    tag: str
    encode: Callable[[Any], Any]
    """Returns the plain value for ``"v"``."""
    decode: Callable[[Any], Any]
    """Returns the value that was encoded. Its argument is untrusted."""


_LEAVES = (
    _Leaf(complex, "complex", _complex_parts, _complex_of),
    _Leaf(bytes, "bytes", _text64, _bytes64),
    _Leaf(bytearray, "bytearray", _text64, _bytearray_of),
    _Leaf(range, "range", _range_parts, _range_of),
    _Leaf(datetime.datetime, "datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    _Leaf(datetime.date, "date", datetime.date.isoformat, datetime.date.fromisoformat),
    _Leaf(datetime.timedelta, "timedelta", _timedelta_parts, _timedelta_of),
    _Leaf(decimal.Decimal, "Decimal", str, _decimal_of),
    _Leaf(torch.Size, "torch.Size", list, torch.Size),
    _Leaf(torch.dtype, "torch.dtype", _torch_name, partial(_torch_constant, torch.dtype)),
    _Leaf(torch.device, "torch.device", str, _device_of),
    _Leaf(torch.layout, "torch.layout", _torch_name, partial(_torch_constant, torch.layout)),
    _Leaf(torch.memory_format, "torch.memory_format", _torch_name, partial(_torch_constant, torch.memory_format)),
)
_LEAF_ENCODERS = {leaf.kind: partial(_tagged, leaf.tag, leaf.encode) for leaf in _LEAVES}
_PLAIN = {type(None), bool, str, int, float, *_LEAF_ENCODERS}
"""Types of values that contain no others."""


def decode(encoded: Any, *, tensor: TensorSource) -> Any:
    """Decode a value; ``tensor(name)`` returns each tensor, or a value instead.

    Raises: FormatError, if it is no encoding, or nested more than ``MAX_STATE_DEPTH`` deep; DecoderError, if a
    registered decoder raises; StateError, if a type is not registered in this process.
    """
    try:
        return with_stack(_decode_all, encoded, tensor)
    # SyntaxError: NumPy parses the names of dtypes.
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, SyntaxError) as error:
        if isinstance(error, (FormatError, StateError)):
            raise
        raise FormatError(f"the small state is no valid encoding: {type(error).__name__}: {error}") from error


def _decode_all(encoded: Any, tensor: TensorSource) -> Any:
    return _Decoder(tensor).any(encoded)  # a new one each time: ``with_stack`` may run this twice


def tensor_names(encoded: Any) -> list[str]:
    """Return the names of all tensors in an encoding, in order. Calls no registered decoder. Raises: FormatError."""
    return [_str(item.get("v")) for item in _tagged_items(encoded) if item[TAG] == "tensor"]


def registered_names(encoded: Any) -> set[str]:
    """Return the names of all registered types in an encoding."""
    return {str(item.get("n")) for item in _tagged_items(encoded) if item[TAG] == "registered"}


def _tagged_items(encoded: Any) -> Iterator[dict[str, Any]]:
    """Yield all tagged values in an encoding, in order, the outer ones first."""
    pending = [encoded]
    while pending:
        item = pending.pop()
        if type(item) is list:
            pending += reversed(item)
        elif type(item) is dict:
            if TAG in item:
                yield item
            if item.get(TAG) != "tensor":
                pending += reversed(item.values())


class _Decoder:
    def __init__(self, tensor: TensorSource) -> None:
        self.tensor = tensor
        self.depth = 0

    def enter(self) -> None:
        """Enter a container; the caller decrements ``depth`` at its end."""
        self.depth += 1
        if self.depth > MAX_STATE_DEPTH:
            raise FormatError(f"the small state is nested more than {MAX_STATE_DEPTH} deep")

    def any(self, item: Any) -> Any:
        if type(item) is dict:
            if TAG in item:
                return self.tagged(item)
            self.enter()
            result = {key: self.any(value) for key, value in item.items()}
            self.depth -= 1
            return result
        if type(item) is list:
            return self.list_(item)
        return item

    def tagged(self, item: dict[str, Any]) -> Any:
        tag = item[TAG]
        if tag in _LEAF_DECODERS:
            return _LEAF_DECODERS[tag](item)
        if tag not in _DECODERS:
            raise FormatError(f"the small state has an unknown tag {tag!r:.50}")
        return _DECODERS[tag](self, item)

    def tensor_of(self, item: dict[str, Any]) -> Any:
        return self.tensor(_str(item["v"]))

    def collection(self, item: dict[str, Any], kind: Callable[[list[Any]], Any]) -> Any:
        return kind(self.list_(item["v"]))

    def mapping(self, item: dict[str, Any], kind: Callable[[dict[Any, Any]], Any]) -> Any:
        return kind(self.pairs(item["v"]))

    def namespace(self, item: dict[str, Any], kind: Callable[..., Any]) -> Any:
        return kind(**self.pairs(item["v"]))

    def defaultdict_(self, item: dict[str, Any]) -> Any:
        factory = None
        if item["factory"] is not None:
            factory = _FACTORIES[item["factory"]]
        return defaultdict(factory, self.pairs(item["v"]))

    def deque_(self, item: dict[str, Any]) -> Any:
        return deque(self.list_(item["v"]), item["maxlen"])

    def list_(self, items: Any) -> list[Any]:
        if type(items) is not list:
            raise FormatError(f"the small state has {type(items).__name__} where a list must be")
        self.enter()
        result = list(map(self.any, items))
        self.depth -= 1
        return result

    def pairs(self, items: Any) -> dict[Any, Any]:
        self.enter()
        result = {self.any(key): self.any(value) for key, value in items}
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
        try:
            return _decoders[name](value)
        except (RecursionError, StateError):
            raise
        except Exception as error:
            raise DecoderError(f"the decoder of {name!r} raised {type(error).__name__}: {error}") from error


# A class attribute: a table of bound methods would keep the decoder, and all its tensors, until the next full
# collection.
_DECODERS: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "tensor": _Decoder.tensor_of,
    "array": _Decoder.array,
    "tuple": partial(_Decoder.collection, kind=tuple),
    "set": partial(_Decoder.collection, kind=set),
    "frozenset": partial(_Decoder.collection, kind=frozenset),
    "dict": partial(_Decoder.mapping, kind=dict),
    "OrderedDict": partial(_Decoder.mapping, kind=OrderedDict),
    "Counter": partial(_Decoder.mapping, kind=Counter),
    "defaultdict": _Decoder.defaultdict_,
    "deque": _Decoder.deque_,
    "Namespace": partial(_Decoder.namespace, kind=argparse.Namespace),
    "SimpleNamespace": partial(_Decoder.namespace, kind=types.SimpleNamespace),
    "registered": _Decoder.registered,
}


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
    array = numpy.frombuffer(_bytes64(item["v"]), dtype).reshape(item["shape"]).copy()
    if item[TAG] == "ndarray":
        return array
    return array[()]


def _int_of(text: Any) -> int:
    return int(_str(text))


def _path_of(text: Any) -> pathlib.Path:
    return pathlib.Path(_str(text))


def _decode_leaf(decode_value: Callable[[Any], Any], item: dict[str, Any]) -> Any:
    return decode_value(item["v"])


_LEAF_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": partial(_decode_leaf, _int_of),
    "float": partial(_decode_leaf, _float_of),
    "Path": partial(_decode_leaf, _path_of),
    "ndarray": _decode_numpy,
    "npscalar": _decode_numpy,
    "np.dtype": _decode_numpy,
    **{leaf.tag: partial(_decode_leaf, leaf.decode) for leaf in _LEAVES},
}
