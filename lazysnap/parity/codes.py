"""The erasure code of one stripe: k data pieces, m parity pieces; any k of them determine the others.

A piece is a string of elements of GF(256), one per byte. A parity piece is a weighted sum of the data pieces. The
weights are a Cauchy matrix whose columns are scaled so that parity 0 has weights of one. So parity 0 is the XOR of the
data, and with one data piece it is its mirror. Every square submatrix of a Cauchy matrix is invertible, scaled or not,
so any k pieces suffice. The weight of a parity and a column is the same for every k and m.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from lazysnap.errors import ConfigError

if TYPE_CHECKING:
    from ctypes import CDLL, Array, c_char
    from pathlib import Path

    from typing_extensions import Buffer

POLYNOMIAL = 0x11D
"""The polynomial of the field, as in ISA-L and RAID-6."""
MAX_PIECES = 256
"""Maximum number of data and parity pieces together."""


def _powers_of_two() -> list[int]:
    powers = [1]
    while len(powers) < 255:
        doubled = powers[-1] << 1
        if doubled > 255:
            doubled ^= POLYNOMIAL
        powers.append(doubled)
    return powers


_POWERS = _powers_of_two()
_LOGARITHMS = dict(zip(_POWERS, range(255), strict=True))


def product(a: int, b: int) -> int:
    """Return the product of two elements of the field."""
    if a == 0 or b == 0:
        return 0
    return _POWERS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % 255]


def quotient(a: int, b: int) -> int:
    """Return ``a`` divided by ``b``, which is not 0."""
    if a == 0:
        return 0
    return _POWERS[(_LOGARITHMS[a] - _LOGARITHMS[b]) % 255]


def _products(weight: int) -> bytes:
    """Return the products of ``weight`` and each element of the field."""
    return bytes(product(weight, value) for value in range(256))


@dataclass(frozen=True)
class Code:
    """The code of stripes with this many data and parity pieces."""

    pieces: int
    """Data pieces: k."""
    parity: int
    """Parity pieces: m."""

    def __post_init__(self) -> None:
        if self.pieces < 1 or self.parity < 1 or self.pieces + self.parity > MAX_PIECES:
            raise ConfigError(
                f"a stripe has at least one data and one parity piece, and at most {MAX_PIECES} together, got "
                f"{self.pieces} and {self.parity}"
            )

    def weight(self, row: int, column: int) -> int:
        """Return the weight of data piece ``column`` in parity piece ``row``. Raises: ConfigError, for other
        indices.
        """
        if not (0 <= row < self.parity and 0 <= column < self.pieces):
            raise ConfigError(f"{self} has no weight of data piece {column} in parity piece {row}")
        return quotient(255 ^ column, (255 - row) ^ column)

    @lru_cache(maxsize=1024)  # noqa: B019  codes are few and small
    def recovery(self, data_piece: int, present: tuple[int, ...]) -> list[int]:
        """Return the weight of each piece in ``present`` in the sum that is the data piece of that number.

        ``present``: exactly k available pieces: 0 to k-1 are data, k to k+m-1 parity.

        Raises: ConfigError, if these are not k pieces of this code.
        """
        k = self.pieces
        if not 0 <= data_piece < k:
            raise ConfigError(f"{self} has no data piece {data_piece}")
        all_pieces = range(k + self.parity)
        different = set(present)
        if len(present) != k or len(different) != k or not different <= set(all_pieces):
            raise ConfigError(
                f"data piece {data_piece} is computed from {k} different pieces of 0 to {all_pieces[-1]}, got "
                f"{[*present]}"
            )
        # One equation per data piece: its weights in the sum add up to 1 if it is the lost piece, else to 0.
        equations = []
        for column in range(k):
            equation = [self._share(piece, column) for piece in present]
            equation.append(int(column == data_piece))
            equations.append(equation)
        for column in range(k):
            _eliminate(equations, column)
        return [equation[k] for equation in equations]

    def _share(self, piece: int, column: int) -> int:
        """Return the weight of data piece ``column`` in any ``piece``."""
        if piece < self.pieces:
            return int(piece == column)
        return self.weight(piece - self.pieces, column)


def _eliminate(equations: list[list[int]], column: int) -> None:
    """Solve for one unknown: its factor becomes 1 in the equation of that number, and 0 in all others.

    Equations before that number are solved. Each is a list of factors, and after them the sum.
    """
    pivot = column
    while equations[pivot][column] == 0:  # ends: the docstring of this module says why
        pivot += 1
    pivot_equation = equations[pivot]
    equations[pivot] = equations[column]
    equations[column] = pivot_equation
    divisor = pivot_equation[column]
    for index, value in enumerate(pivot_equation):
        pivot_equation[index] = quotient(value, divisor)
    for equation in equations:
        factor = equation[column]
        if equation is not pivot_equation and factor != 0:
            for index, value in enumerate(pivot_equation):
                equation[index] ^= product(factor, value)


def multiply_add(weight: int, data: "Buffer", out: "Buffer") -> None:
    """Add ``weight`` times ``data`` to ``out``, in place: ``out ^= weight * data``.

    Both have the same length, and ``out`` is writable. Releases the interpreter lock.

    Raises: ConfigError, for other buffers, or if neither ISA-L nor numpy is installed.
    """
    source = memoryview(data).cast("B")
    target = memoryview(out).cast("B")
    if not 0 <= weight < 256:
        raise ConfigError(f"a weight is 0 to 255, got {weight}")
    if len(source) != len(target) or target.readonly:
        kind = "to write to"
        if target.readonly:
            kind = "that are read-only"
        raise ConfigError(
            f"multiply_add needs as many bytes to write to as to read, got {len(source)} to read and {len(target)} "
            f"{kind}"
        )
    if weight and len(source):
        _arithmetic().multiply_add(weight, source, target)


def library() -> str:
    """Return the name of the library that computes: ``"ISA-L"`` or ``"numpy"``. Raises: ConfigError, if neither is
    installed."""
    return _arithmetic().name


@cache
def _arithmetic() -> "IsaL | Numpy":
    """Return the function that multiplies and adds buffers of equal, positive length; the weight is not 0."""
    for path in isal_paths():
        try:
            return IsaL(path)
        except (OSError, AttributeError, ConfigError):  # no file, another library, or wrong results on this processor
            continue
    return Numpy()


def isal_paths() -> "list[str | Path]":
    """Return the possible paths of ISA-L: in the wheel of pyeclib, which is not imported, then in the system."""
    import importlib.util
    from ctypes.util import find_library
    from pathlib import Path

    spec = importlib.util.find_spec("pyeclib")
    paths: list[str | Path] = []
    if spec is not None and spec.origin is not None:
        paths += sorted(Path(spec.origin).parent.parent.glob("pyeclib.libs/libisal*"))
    if not paths:
        name = find_library("isal")
        if name is not None:
            paths.append(name)
    return paths


class IsaL:
    """Intel's storage library, of the wheel of ``pyeclib`` or of the system, called by ctypes."""

    name = "ISA-L"
    MAX_BYTES = 1 << 30
    """Limit of one call: lengths are C ints."""

    def __init__(self, path: "str | Path") -> None:
        import ctypes

        self._library: CDLL = ctypes.CDLL(str(path))
        self._tables: dict[int, Array[c_char]] = {}
        self._init_tables = self._library.ec_init_tables
        self._update = self._library.ec_encode_data_update
        # The library has several implementations, and the processor decides which one runs. A wrong one must be
        # detected before a restart.
        data = bytes(range(256)) * 17 + bytes(range(201))
        for weight in (2, 0x8E):
            out = bytearray(len(data))
            self.multiply_add(weight, memoryview(data), memoryview(out))
            if out != data.translate(_products(weight)):
                raise ConfigError(f"{path} computes wrong products")

    def multiply_add(self, weight: int, source: memoryview, target: memoryview) -> None:
        """Add ``weight`` times ``source`` to ``target``."""
        from ctypes import addressof, byref, c_char, c_char_p, c_void_p, cast

        table = self._table(weight)
        if source.readonly:
            # ctypes gives the address of read-only memory only for bytes, so it is copied. ``copy`` keeps the bytes
            # alive until the calls below are over.
            copy = cast(c_char_p(bytes(source)), c_void_p)
            source_address = copy.value or 0
        else:
            source_address = addressof(c_char.from_buffer(source))
        target_address = addressof(c_char.from_buffer(target))
        for offset in range(0, len(source), self.MAX_BYTES):
            length = min(self.MAX_BYTES, len(source) - offset)
            source_pointer = c_void_p(source_address + offset)
            target_pointer = byref(c_void_p(target_address + offset))
            self._update(length, 1, 1, 0, table, source_pointer, target_pointer)

    def _table(self, weight: int) -> "Array[c_char]":
        if weight not in self._tables:
            from ctypes import create_string_buffer

            table = create_string_buffer(32)
            self._init_tables(1, 1, bytes([weight]), table)
            self._tables[weight] = table
        return self._tables[weight]


class Numpy:
    """The same with numpy: XOR is as fast, other weights run at 0.6 to 1 GB/s."""

    name = "numpy"
    BLOCK_BYTES = 1 << 16
    """Bytes computed at a time: numpy makes an index of eight bytes for each, and these must fit the cache."""

    def __init__(self) -> None:
        try:
            import numpy
        except ImportError as error:
            raise ConfigError(
                "parity between nodes needs ISA-L or numpy, and neither is here; run pip install 'lazysnap[parity]'"
            ) from error
        self._numpy = numpy
        self._table = cache(self._make_table)

    def _make_table(self, weight: int) -> Any:
        return self._numpy.frombuffer(_products(weight), self._numpy.uint8)

    def multiply_add(self, weight: int, source: memoryview, target: memoryview) -> None:
        """Add ``weight`` times ``source`` to ``target``."""
        numpy = self._numpy
        data = numpy.frombuffer(source, numpy.uint8)
        out = numpy.frombuffer(target, numpy.uint8)
        if weight == 1:
            numpy.bitwise_xor(out, data, out=out)
            return
        table = self._table(weight)
        products = numpy.empty(self.BLOCK_BYTES, numpy.uint8)
        for start in range(0, len(data), self.BLOCK_BYTES):
            block = out[start : start + self.BLOCK_BYTES]
            factors = data[start : start + len(block)]
            # "clip": otherwise numpy writes to a temporary buffer first. No index exceeds 255.
            block_products = numpy.take(table, factors, out=products[: len(block)], mode="clip")
            numpy.bitwise_xor(block, block_products, out=block)
