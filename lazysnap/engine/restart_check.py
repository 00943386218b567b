"""The check of a restart: compares a repeated step with its earlier capture in memory.

State outside the snapshot cannot be compared, but its effect on the step can: a batch that the program fetched ahead, a
generator that is not part of the state. docs/architecture.md explains why the check loses nothing.
"""

import ctypes
import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from lazysnap import faults
from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.capture.dtypes import DTYPES, logical_facts
from lazysnap.capture.plan import view_of
from lazysnap.console import some_of
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.errors import LazySnapError
from lazysnap.keeper.client import KeeperClient
from lazysnap.memory.slots import TrainerSlot
from lazysnap.resolver import SnapshotKey
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import TAG, CaptureMeta

_DEADLINE_S = 60.0
"""Seconds for the copy of the repeated step and the comparison together."""
_PIECE_BYTES = 16 << 20
"""Bytes that are compared between two checks of the deadline."""
_ELEMENTS = 1 << 15
"""Elements of a difference that are computed at a time: torch uses one thread for so many."""
_MOST_NAMED = 3
_ROUNDING = 1e-3
"""Largest relative difference of one step that another order of sums in kernels causes."""

_GENERATORS = "owned"
"""Key of the generators of loaders and samplers, as in ``data.streams``. A sampler makes some at its first iteration,
so only generators that both captures have are compared.
"""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Difference:
    """The difference between a repeated step and its earlier capture. Empty: they are identical, bit for bit."""

    entries: tuple[str, ...] = ()
    """Names of differing entries of the small state, and of tensors that only one of the two has."""
    tensors: tuple[str, ...] = ()
    """Names of differing tensors; the largest difference first if ``ratios`` is known."""
    ratios: tuple[float, ...] = ()
    """The largest difference in each of ``tensors``, relative to its largest value. Empty if not computed."""

    @property
    def text(self) -> str:
        """Return a text with the differences; empty if there are none."""
        parts = []
        if self.entries:
            parts.append(f"small state: {_named(self.entries)}")
        if self.tensors:
            named = list(self.tensors)
            if self.ratios:
                named = [f"{name} by {ratio:.1g}" for name, ratio in zip(self.tensors, self.ratios, strict=True)]
            parts.append(f"tensors: {_named(named)}")
        return "; ".join(parts)

    @property
    def usual_cause(self) -> str:
        """Return the usual cause of such a difference."""
        if self.entries and not self.tensors and all(name.startswith("callbacks.") for name in self.entries):
            return (
                "a callback that does not load its whole state: a ModelCheckpoint without dirpath writes to another "
                "directory after each start, and forgets its best files"
            )
        if self.entries and not self.tensors:
            return "a time in the state, which no restart repeats, or data and random numbers that no snapshot has"
        if self.entries:
            return "a batch that the program holds or draws ahead, or data and random numbers that no snapshot has"
        if self.ratios and max(self.ratios) <= _ROUNDING:
            return "kernels that are not deterministic (torch.use_deterministic_algorithms)"
        return (
            "data that are not the same at each start, a batch that the program holds, or an object that trains and is "
            "not part of the state"
        )


class RestartCheck:
    """Compares one step of a restart with the capture of an earlier start. Used on the training thread.

    IDLE -> AWAITING (``begin``) -> COMPARING (``compare``), and from any to IDLE (``cancel``, ``report``). The slots
    that it reads are not overwritten until it is IDLE again.
    """

    def __init__(self, client: KeeperClient, messages: Messages, clocks: tuple[str, ...], *, is_alone: bool) -> None:
        """``clocks``: see ``StateSource``. ``is_alone``: True if there is one rank."""
        self._client = client
        self._is_alone = is_alone
        self._messages = messages
        self._clocks = clocks
        self.step: int | None = None
        """The step that this start repeats; it stays after the check."""
        self._expected: TrainerSlot | None = None
        """The slot with the capture of the earlier start; ``None`` while IDLE."""
        self._comparison: _Comparison | None = None
        """Not ``None`` while COMPARING."""

    def begin(self, key: SnapshotKey) -> None:
        """Wait for the repetition of a captured step, and let no later restart repeat it."""
        self.cancel()
        for slot in self._client.mapped():
            view = slot.view()
            if view.is_whole and view.step == key.step and view.start == int(key.start, 16):
                slot.allow_repeat(is_repeatable=False)
                self.step = key.step
                self._expected = slot
        faults.point("engine.check_begun")

    def compare(self, capture: Capture) -> None:
        """Compare a new capture, if it is of the awaited step, in the background once it is whole."""
        if self._expected is None or self._comparison is not None:
            return
        if capture.step != self.step:
            self._end(MessageKind.RESTART_NOT_COMPARED, text="the step was not captured again")
            return
        comparison = _Comparison(self._expected, capture, self._clocks)
        try:
            comparison.start()
        except RuntimeError as error:  # a limit of threads
            self._end(MessageKind.RESTART_NOT_COMPARED, text=error)
        else:
            self._comparison = comparison

    def uses(self, slot: TrainerSlot) -> bool:
        """Return True if the slot is being compared, or will be."""
        if self._expected is None:
            return False
        return slot is self._expected or (self._comparison is not None and slot is self._comparison.capture.slot)

    def report(self) -> None:
        """Print the result once it is known. Hot."""
        comparison = self._comparison
        if comparison is not None and not comparison.is_alive():
            self._report(comparison)

    def _report(self, comparison: "_Comparison") -> None:
        difference = comparison.difference
        if difference is None:
            self._end(MessageKind.RESTART_NOT_COMPARED, text=comparison.failure)
        elif difference.text:
            self._messages.statistics.restart_check = difference.text
            self._end(MessageKind.RESTART_DIFFERS, text=difference.text, cause=difference.usual_cause)
        else:
            self._messages.statistics.restart_check = "identical"
            scope = "this training resumes exactly"
            if not self._is_alone:
                # Each rank compares its own part, and does not know the results of the others.
                scope = "this is the part of rank 0, and every rank with another result says so"
            self._end(MessageKind.RESTART_EXACT, scope=scope)

    def give_up(self) -> bool:
        """End a comparison because a capture needs a slot, and report the result so far. Returns: True if there was
        one.
        """
        comparison = self._comparison
        if comparison is None:
            return False
        comparison.is_cancelled = True
        self._report(comparison)
        return True

    def wait(self, timeout_s: float) -> None:
        """Block until a running comparison is over, at most ``timeout_s``, and report it."""
        if self._comparison is not None:
            self._comparison.join(timeout_s)
            self.report()

    def cancel(self) -> None:
        """Cancel the check: training continues from another state, or ends."""
        if self._comparison is not None:
            self._comparison.is_cancelled = True
        self._comparison = None
        self._expected = None
        self.step = None

    def _end(self, event: MessageKind, **values: Any) -> None:
        self._comparison = None
        self._expected = None
        self._messages.tell(event, step=self.step, **values)


class _Comparison(threading.Thread):
    """Compares two slots in the background. Its errors do not reach training."""

    def __init__(self, expected: TrainerSlot, capture: Capture, clocks: tuple[str, ...]) -> None:
        super().__init__(name="lazysnap-restart-check", daemon=True)
        self.capture = capture
        self._expected = expected
        self._clocks = clocks
        self._deadline_s = time.monotonic() + _DEADLINE_S
        self.is_cancelled = False
        self.difference: Difference | None = None
        """The result, at first without ratios; ``None`` if there is none."""
        self.failure = "its slots were needed for the next capture"
        """The reason if there is no result, at first that of a cancelled comparison."""

    def run(self) -> None:
        """Wait until the capture is whole, then compare."""
        try:
            self.capture.released.wait(_DEADLINE_S)
            if self.capture.phase is CapturePhase.WHOLE:
                faults.point("engine.compare")
                self._compare(_Image.of(self._expected), _Image.of(self.capture.slot))
            else:
                self.failure = f"the repeated step was not captured: {self.capture.reason or 'its copy hangs'}"
        except Exception as error:  # noqa: BLE001  the outermost handler of the thread: it costs the line alone
            if not self.is_cancelled:
                self.failure = str(error) or repr(error)

    def _compare(self, before: "_Image", after: "_Image") -> None:
        entries = [name for name in _differing(before.meta.state, after.meta.state) if name not in self._clocks]
        tensors = []
        for name in sorted({*before.names, *after.names}):
            if not (name in before.layout and name in after.layout) or before.spec(name) != after.spec(name):
                entries.append(name)
            elif not self._are_equal(before, after, name):
                if before.tensor(name).is_floating_point():
                    tensors.append(name)
                else:  # a generator or a counter
                    entries.append(name)
        self.difference = Difference(tuple(entries), tuple(tensors))
        ratios = {}
        for name in tensors:
            ratios[name] = self._relative_difference(before.tensor(name), after.tensor(name))
        by_ratio = sorted(ratios.items(), key=itemgetter(1), reverse=True)
        names = tuple(name for name, _ in by_ratio)
        self.difference = Difference(tuple(entries), names, tuple(ratio for _, ratio in by_ratio))

    def _are_equal(self, before: "_Image", after: "_Image", name: str) -> bool:
        first = before.address(name)
        second = after.address(name)
        size_bytes = before.spec(name).nbytes
        for offset in range(0, size_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size_bytes - offset)
            # Other threads can run in it, unlike in a comparison of memoryviews.
            is_equal = _libc.memcmp(first + offset, second + offset, length) == 0
            self._check_time()  # checked after the comparison: a slot that was needed has other bytes by now
            if not is_equal:
                return False
        return True

    def _relative_difference(self, before: torch.Tensor, after: torch.Tensor) -> float:
        """Return the greatest difference of two elements, relative to the greatest element; infinity if it is not
        finite.
        """
        greatest = 0.0
        largest = 0.0
        for start in range(0, before.numel(), _ELEMENTS):
            first = before[start : start + _ELEMENTS].double()
            second = after[start : start + _ELEMENTS].double()
            difference = float((first - second).abs().max())
            if not math.isfinite(difference):
                return math.inf
            greatest = max(greatest, difference)
            largest = max(largest, float(first.abs().max()), float(second.abs().max()))
            self._check_time()
        if not largest:
            return 0.0
        return greatest / largest

    def _check_time(self) -> None:
        if self.is_cancelled or time.monotonic() > self._deadline_s:
            raise LazySnapError(f"the comparison took more than {_DEADLINE_S:g} s")


@dataclass(frozen=True)
class _Image:
    """A capture that was read from a slot."""

    meta: CaptureMeta
    layout: Layout
    data: torch.Tensor
    """All bytes. The view keeps the slot mapped."""

    @classmethod
    def of(cls, slot: TrainerSlot) -> "_Image":
        """Read the headers of a whole capture. Raises: FormatError."""
        size_bytes = slot.view().image_bytes
        layout = Layout.parse(slot.image[:size_bytes], size_bytes)
        return cls(CaptureMeta.from_bytes(slot.read_meta()), layout, view_of(slot.image, 0, torch.uint8, (size_bytes,)))

    @property
    def names(self) -> list[str]:
        """Return the names of all stored tensors."""
        return [spec.name for spec in self.layout.specs]

    def spec(self, name: str) -> TensorSpec:
        """Return name, dtype and shape of a tensor."""
        spec, _ = self.layout.find(name)
        return spec

    def address(self, name: str) -> int:
        """Return the bytes of a tensor as a view."""
        _, offset = self.layout.find(name)
        return self.data.data_ptr() + offset

    def tensor(self, name: str) -> torch.Tensor:
        """Return the elements of a tensor, flattened; complex elements as pairs of real numbers."""
        spec, offset = self.layout.find(name)
        stored = self.data[offset : offset + spec.nbytes].view(DTYPES[spec.dtype])
        if stored.is_complex():
            return torch.view_as_real(stored).flatten()
        dtype, _ = logical_facts(stored.dtype, spec.shape, self.meta.tensors.get(name, {}).get("dtype"))
        if dtype.is_complex:
            return stored  # already real numbers
        return stored.view(dtype)


def _differing(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the places in an encoded state (``state.codec``) where two of them differ."""
    if before == after:
        return
    if path[-1:] == (_GENERATORS,) and _are_generators(before) and _are_generators(after):
        states = {place: state for place, _, state in after}
        for place, _, state in before:
            yield from _differing(state, states.get(place, state), (*path, place))
    elif isinstance(before, str) and isinstance(after, str):
        return  # such as a path in the directory of a start: no step depends on a text
    elif _is_tagged(before) or _is_tagged(after):
        yield from _differing_tagged(before, after, path)
    elif isinstance(before, dict) and isinstance(after, dict) and len(before) == len(after):
        same_keys = after
        if before.keys() != after.keys():  # keys are strings, too
            same_keys = dict(zip(before, after.values(), strict=True))
        for key in before:
            yield from _differing(before[key], same_keys[key], (*path, key))
    elif _are_nested(before) and _are_nested(after) and len(before) == len(after):
        for number, (first, second) in enumerate(zip(before, after, strict=True)):
            yield from _differing(first, second, (*path, str(number)))
    else:
        yield ".".join(path)


def _differing_tagged(before: Any, after: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the differing places of values of which one has a type. Strings in them encode bytes or a number."""
    if not _is_tagged(before) or not _is_tagged(after) or before.keys() != after.keys() or before[TAG] != after[TAG]:
        yield ".".join(path)
    elif before[TAG] != "Path":
        for key in before:
            if not isinstance(before[key], str):
                yield from _differing(before[key], after[key], path)
            elif before[key] != after[key]:
                yield ".".join(path)


def _is_tagged(value: Any) -> bool:
    return isinstance(value, dict) and TAG in value


def _are_generators(value: Any) -> bool:
    """Return True for a list of places, types and states."""
    return isinstance(value, list) and all(isinstance(item, list) and len(item) == 3 for item in value)


def _are_nested(value: Any) -> bool:
    """Return True for a list with nested items. A list of plain values is reported as a whole."""
    return isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)


def _named(names: Iterable[str]) -> str:
    """Return the first names, without duplicates."""
    return some_of(dict.fromkeys(names), _MOST_NAMED)
