"""Memory as processors that do not keep stores in order may show it to a process.

Each place remembers all of its values. A load returns any of them that is not older than one the process knows of. With
a value comes what its writer knew at its last fence, and the reader knows that, too, after its own next fence. This is
what release and acquire fences promise, and no more.
"""

from collections.abc import Callable, Hashable

Knowledge = dict[Hashable, int]
"""For each place the number of the oldest value that may still be loaded."""


class Process:
    """What one process knows of memory."""

    def __init__(self) -> None:
        self.known: Knowledge = {}
        self.loaded: Knowledge = {}
        """What came with values since the last fence."""
        self.published: Knowledge = {}
        """What was known at the last fence: it goes with every store."""


class WeakMemory:
    """Places and their values."""

    def __init__(self, pick: Callable[[int], int], *, has_total_order: bool = False) -> None:
        """Make empty memory.

        Args:
            pick: returns a number below its argument.
            has_total_order: True if all fences take place one after the other, as full fences do.
        """
        self._pick = pick
        self._values: dict[Hashable, list[tuple[int, Knowledge]]] = {}
        self._has_total_order = has_total_order
        self._ordered: Knowledge = {}

    def load(self, process: Process, place: Hashable) -> int:
        """Return a value that the process may see."""
        values = self._values.get(place, [(0, {})])
        first = process.known.get(place, 0)
        number = first + self._pick(len(values) - first)
        process.known[place] = number
        value, knowledge = values[number]
        _join(process.loaded, knowledge)
        return value

    def store(self, process: Process, place: Hashable, value: int) -> None:
        """Append a value."""
        values = self._values.setdefault(place, [(0, {})])
        values.append((value, dict(process.published)))
        process.known[place] = len(values) - 1

    def fence(self, process: Process) -> None:
        """Order the accesses of a process before it and after it."""
        _join(process.known, process.loaded)
        process.loaded = {}
        if self._has_total_order:
            _join(self._ordered, process.known)
            process.known = dict(self._ordered)
        process.published = dict(process.known)


class WeakWords:
    """The words of a page, as one process sees them."""

    def __init__(
        self, memory: WeakMemory, process: Process, page: str, after_load: Callable[[], object] = lambda: None
    ) -> None:
        """``after_load``: called after each load, before anything else of this process."""
        self._memory = memory
        self._process = process
        self._page = page
        self._after_load = after_load

    def __getitem__(self, index: int) -> int:
        value = self._memory.load(self._process, (self._page, index))
        self._after_load()
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._memory.store(self._process, (self._page, index), value)


def _join(knowledge: Knowledge, other: Knowledge) -> None:
    for place, number in other.items():
        knowledge[place] = max(number, knowledge.get(place, 0))
