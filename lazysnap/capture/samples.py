"""Some words of every frozen tensor, compared at every boundary, past torch's book-keeping.

``tensor.data.mul_()`` moves neither version nor pointer; averages of teachers are updated just so.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

_SAMPLES = 8
"""Words of each tensor."""
_WORD_BYTES = 8


def places_in(name: str, nbytes: int) -> range:
    """Offsets in bytes of the words that are looked at: evenly spaced, always the same for a name."""
    words = nbytes // _WORD_BYTES
    count = min(_SAMPLES, words)
    if count == 0:
        return range(0)
    chance = xxhash.xxh3_64_intdigest(name.encode())
    # Not a round number, and another one for each: weights have rows and columns.
    stride = words // count - (chance % 7 if words // count > 64 else 0)
    first = chance // 7 % (words - (count - 1) * stride)
    return range(_WORD_BYTES * first, _WORD_BYTES * (first + count * stride), _WORD_BYTES * stride)


def words_in(name: str, flat: torch.Tensor) -> torch.Tensor:
    """A view of these words, one a row, in the bytes of a tensor. No copy."""
    places = places_in(name, flat.numel())
    return flat.as_strided((len(places), _WORD_BYTES), (places.step, 1), flat.storage_offset() + places.start)


class HostSamples:
    """Of tensors in CPU memory, read straight from memory: what changed is known at once."""

    def __init__(self, tensors: Iterable[tuple[int, str, torch.Tensor]]) -> None:
        self._words: list[Any] = []
        self._owners: list[int] = []
        for index, name, tensor in tensors:
            start = tensor.data_ptr()
            words: list[Any] = [ctypes.c_uint64.from_address(start + at) for at in places_in(name, tensor.nbytes)]
            words = words or [ctypes.c_uint8.from_address(start + at) for at in range(tensor.nbytes)]
            self._words += words
            self._owners += [index] * len(words)
        self._first = self._read()

    def _read(self) -> list[int]:
        return [word.value for word in self._words]

    def changed(self) -> list[int]:
        """Indices of tensors of which a word differs. They must be where they were. Hot."""
        now = self._read()
        if now == self._first:
            return []
        return sorted({self._owners[i] for i, value in enumerate(now) if value != self._first[i]})


@dataclass(frozen=True)
class _Answer:
    rows: torch.Tensor
    """In host memory, once the event is done: for each word whether it differs."""
    done: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


class DeviceSamples:
    """Of tensors on one device: a few kernels on the compute stream gather and compare. Only the first answer is waited
    for: what changes at every step is known before the first capture, what changes later a boundary later.
    """

    def __init__(self, device: torch.device, tensors: Iterable[tuple[int, str, torch.Tensor]]) -> None:
        self._device = device
        self._views: list[torch.Tensor] = []
        self._owners: list[int] = []
        for index, name, tensor in tensors:
            words = words_in(name, tensor.detach().reshape(-1).view(torch.uint8))
            self._views.append(words)
            self._owners += [index] * len(words)
        self._first = self._gather()
        self._answer: _Answer | None = None

    def _gather(self) -> torch.Tensor:
        with torch.no_grad():
            if not self._views:
                return torch.empty((0, _WORD_BYTES), dtype=torch.uint8, device=self._device)
            return torch.cat(self._views)

    def changed(self) -> list[int]:
        """Indices of tensors that were changed at an earlier boundary; asks about this one.

        Blocks: the first time, for the answer to this one.
        """
        answer = self._answer
        if answer is not None and not answer.is_there:
            return []  # the device is behind: at a later boundary
        self._answer = self._ask()
        if answer is None:
            answer = self._answer
            if answer.done is not None:
                answer.done.synchronize()
        return sorted({self._owners[row] for row in answer.rows.nonzero().flatten().tolist()})

    def _ask(self) -> _Answer:
        rows = (self._gather() != self._first).any(dim=1)
        if self._device.type != "cuda":
            return _Answer(rows, None)
        host = torch.empty(rows.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        return _Answer(host, torch.cuda.current_stream(self._device).record_event())


def samples_of(named: Sequence[tuple[str, torch.Tensor]]) -> "list[HostSamples | DeviceSamples]":
    """For each device its own."""
    placed = [(index, name, tensor) for index, (name, tensor) in enumerate(named)]
    devices = sorted({tensor.device for _, tensor in named}, key=str)
    return [
        HostSamples(item for item in placed if item[2].device == device)
        if device.type == "cpu"
        else DeviceSamples(device, [item for item in placed if item[2].device == device])
        for device in devices
    ]
