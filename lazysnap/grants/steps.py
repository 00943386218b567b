"""A set of steps that takes a bit for each, not seventy bytes: a training of months completes millions of snapshots."""

from collections.abc import Iterable, Iterator, Set

_BITS = 1024


class StepSet(Set[int]):
    """Steps, the newest first. What asks for the newest of them, or for given ones, does not look at the others."""

    def __init__(self, steps: Iterable[int] = ()) -> None:
        self._blocks: dict[int, int] = {}
        """The bits of ``_BITS`` consecutive steps each, sorted by step."""
        self._count = 0
        for step in steps:
            self.add(step)

    @property
    def newest(self) -> int:
        """The greatest step; -1 if there is none."""
        return next(iter(self), -1)

    def add(self, step: int) -> None:
        """Add a step."""
        if step in self:
            return
        number, bit = divmod(step, _BITS)
        is_behind = number not in self._blocks and step < self.newest
        self._blocks[number] = self._blocks.get(number, 0) | 1 << bit
        self._count += 1
        if is_behind:
            self._blocks = dict(sorted(self._blocks.items()))

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        number, bit = divmod(step, _BITS)
        return bool(self._blocks.get(number, 0) >> bit & 1)

    def __iter__(self) -> Iterator[int]:
        for number, bits in reversed(self._blocks.items()):
            while bits:
                bit = bits.bit_length() - 1
                yield number * _BITS + bit
                bits ^= 1 << bit

    def __len__(self) -> int:
        return self._count
