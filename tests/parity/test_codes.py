"""Whatever members of a group are lost, up to its parity: their parts come back bit for bit, with either library."""

import ctypes.util
import itertools
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysnap.errors import ConfigError
from lazysnap.parity.codes import Code, IsaL, Numpy, isal_paths, library, multiply_add, product, quotient
from lazysnap.parity.groups import Group, Pieces

SIZES = (1000, 0, 4097, 64, 1, 777, 4096, 2500)
"""Of the parts; of what size they are must not matter."""
SAMPLE = random.Random(3).randbytes(300_007)


@pytest.fixture(scope="module", params=["ISA-L", "numpy"])
def arithmetic(request):
    return IsaL(isal_paths()[0]) if request.param == "ISA-L" else Numpy()


def slow_product(a, b):
    """By the definition: polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1."""
    total = 0
    for bit in range(8):
        total ^= (a << bit) * (b >> bit & 1)
    for bit in reversed(range(8, 15)):
        total ^= (0x11D << bit - 8) * (total >> bit & 1)
    return total


def added(weight, data, out):
    return bytes(before ^ slow_product(weight, value) for value, before in zip(data, out, strict=True))


@pytest.mark.slow
def test_the_field_is_the_field():
    for a, b in itertools.product(range(256), repeat=2):
        assert product(a, b) == slow_product(a, b)
        assert b == 0 or product(quotient(a, b), b) == a


@pytest.mark.slow
def test_every_weight_is_multiplied_with_every_byte(arithmetic):
    data, out = bytes(range(256)), SAMPLE[:256]
    for weight in range(1, 256):
        target = bytearray(out)
        arithmetic.multiply_add(weight, memoryview(data), memoryview(target))
        assert target == added(weight, data, out)


@pytest.mark.parametrize("length", [1, 15, 32, 33, 63, 127, 65535, 65537, 300_000])
def test_every_length_at_any_place_in_memory(arithmetic, length):
    weight = 201
    table = bytes(slow_product(weight, value) for value in range(256))
    for start in (0, 1, 7):
        target = bytearray(SAMPLE)
        arithmetic.multiply_add(weight, memoryview(SAMPLE)[start : start + length], memoryview(target)[3 : 3 + length])
        products = SAMPLE[start : start + length].translate(table)
        sums = int.from_bytes(SAMPLE[3 : 3 + length], "big") ^ int.from_bytes(products, "big")
        assert target == SAMPLE[:3] + sums.to_bytes(length, "big") + SAMPLE[3 + length :]


def test_buffers_beyond_what_one_call_takes_are_cut():
    class Cut(IsaL):
        MAX_BYTES = 1000

    whole, cut = bytearray(SAMPLE), bytearray(SAMPLE)
    IsaL(isal_paths()[0]).multiply_add(77, memoryview(SAMPLE), memoryview(whole))
    Cut(isal_paths()[0]).multiply_add(77, memoryview(bytearray(SAMPLE)), memoryview(cut))
    assert whole == cut


@given(st.integers(0, 255), st.binary(max_size=300), st.booleans())
def test_any_buffer_is_taken(weight, data, is_writable):
    out = SAMPLE[: len(data)]
    target = bytearray(out)
    multiply_add(weight, bytearray(data) if is_writable else data, target)
    assert target == added(weight, data, out)


@pytest.mark.parametrize(
    ("weight", "data", "out"),
    [
        (256, b"a", bytearray(1)),
        (-1, b"a", bytearray(1)),
        (3, b"ab", bytearray(1)),
        (3, b"", bytearray(1)),
        (3, b"a", bytes(1)),
    ],
)
def test_bad_arguments_are_one_error_and_nothing_is_written(weight, data, out):
    with pytest.raises(ConfigError):
        multiply_add(weight, data, out)
    assert not any(out)


def test_the_first_parity_is_the_xor_of_the_data():
    assert {Code(8, parity).weight(0, column) for parity in (1, 2, 3, 4) for column in range(8)} == {1}


def shares(code, piece):
    """What a piece is: its weight of each data piece."""
    if piece < code.pieces:
        return [int(piece == column) for column in range(code.pieces)]
    return [code.weight(piece - code.pieces, column) for column in range(code.pieces)]


def check_recovery(code, present):
    for wanted in range(code.pieces):
        weights = code.recovery(wanted, tuple(present))
        sums = [0] * code.pieces
        for weight, piece in zip(weights, present, strict=True):
            sums = [total ^ product(weight, share) for total, share in zip(sums, shares(code, piece), strict=True)]
        assert sums == shares(code, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("parity", [1, 2, 3, 4])
def test_any_pieces_that_are_enough_in_number_are_enough(parity):
    for pieces in (1, 2, 3, 5, 8):
        for present in itertools.combinations(range(pieces + parity), pieces):
            check_recovery(Code(pieces, parity), present)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_any_pieces_of_large_codes_too_in_any_order(data):
    pieces = data.draw(st.integers(1, 24))
    code = Code(pieces, data.draw(st.integers(1, 256 - pieces)))
    check_recovery(code, data.draw(st.permutations(range(pieces + code.parity)))[:pieces])


def test_the_largest_codes_have_no_weight_of_zero():
    for code in (Code(1, 255), Code(255, 1), Code(128, 128)):
        weights = {code.weight(row, column) for row in range(code.parity) for column in range(code.pieces)}
        assert weights <= {*range(1, 256)}


@pytest.mark.parametrize(("pieces", "parity"), [(0, 1), (1, 0), (-1, 2), (200, 57)])
def test_a_code_that_cannot_be_is_refused(pieces, parity):
    with pytest.raises(ConfigError, match="at least one data and one parity piece"):
        Code(pieces, parity)


@pytest.mark.parametrize(
    ("wanted", "present"),
    [(0, [1, 2]), (0, [1, 2, 3, 4]), (0, [1, 1, 2]), (0, [1, 2, 5]), (0, [-1, 1, 2]), (3, [0, 1, 2]), (-1, [0, 1, 2])],
)
def test_pieces_that_are_too_few_or_none_of_the_code_are_refused(wanted, present):
    with pytest.raises(ConfigError, match="data piece"):
        Code(3, 2).recovery(wanted, tuple(present))


def test_weights_beyond_the_code_are_refused():
    for row, column in ((2, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(ConfigError, match="has no weight"):
            Code(3, 2).weight(row, column)


class Protected:
    """A group whose parts are protected as its keepers do it: real bytes, in the group's order of stripes."""

    def __init__(self, arithmetic, group):
        self.arithmetic, self.group, self.code = arithmetic, group, Code(group.pieces, group.parity)
        count = len(group.members)
        self.parts = [random.Random(member).randbytes(SIZES[member]) for member in range(count)]
        self.piece_bytes = Pieces(group, tuple(map(len, self.parts)), 1 << 20).piece_bytes
        self.pieces = {
            (stripe, group.data(stripe).index(member)): part.ljust(self.piece_bytes * group.pieces, b"\0")[
                self.piece_bytes * piece : self.piece_bytes * (piece + 1)
            ]
            for member, part in enumerate(self.parts)
            for piece, stripe in enumerate(group.stripes(member))
        }
        for stripe, row in [held for member in range(count) for held in group.parities(member)]:
            weights = [self.code.weight(row, column) for column in range(group.pieces)]
            columns = [self.pieces[stripe, column] for column in range(group.pieces)]
            self.pieces[stripe, group.pieces + row] = self.sum(weights, columns)

    def sum(self, weights, pieces):
        total = bytearray(self.piece_bytes)
        for weight, piece in zip(weights, pieces, strict=True):
            if weight and piece:
                self.arithmetic.multiply_add(weight, memoryview(piece), memoryview(total))
        return bytes(total)

    def without(self, lost, member):
        """The part of ``member`` from what all but ``lost`` hold."""
        found = b""
        for stripe in self.group.stripes(member):
            holders = [*self.group.data(stripe), *self.group.holders(stripe)]
            left = [piece for piece, position in enumerate(holders) if position not in lost][: self.code.pieces]
            weights = self.code.recovery(self.group.data(stripe).index(member), tuple(left))
            found += self.sum(weights, [self.pieces[stripe, piece] for piece in left])
        assert not any(found[SIZES[member] :])
        return found[: SIZES[member]]


GROUPS = [(nodes, parity) for nodes in range(2, 9) for parity in range(1, min(4, nodes - 1) + 1)]


@pytest.mark.parametrize(("nodes", "parity"), GROUPS)
def test_any_lost_members_up_to_the_parity_are_rebuilt_bit_for_bit_and_no_more(arithmetic, nodes, parity):
    protected = Protected(arithmetic, Group(tuple(range(nodes)), parity))
    for count in range(1, parity + 1):
        for lost in itertools.combinations(range(nodes), count):
            assert [protected.without(lost, member) == protected.parts[member] for member in lost] == [True] * count
    for lost in itertools.combinations(range(nodes), parity + 1):
        with pytest.raises(ConfigError, match="different pieces"):
            protected.without(lost, lost[0])


def chosen(*missing):
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in missing)
    code = (
        f"import sys; {blocked}from lazysnap.parity.codes import *; out = bytearray(3); multiply_add(5, b'abc', out); "
    )
    code += "print(library(), out.hex(), sys.modules.get('numpy') is not None)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_what_is_installed_computes_and_numpy_is_imported_only_where_it_must():
    expected = added(5, b"abc", bytes(3)).hex()
    assert library() == "ISA-L"
    assert chosen().stdout.split() == ["ISA-L", expected, "False"]
    if ctypes.util.find_library("isal") is None:
        assert chosen("pyeclib").stdout.split() == ["numpy", expected, "True"]
        assert "run pip install 'lazysnap[parity]'" in chosen("pyeclib", "numpy").stderr
