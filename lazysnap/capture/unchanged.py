"""Whether live tensors still are what a capture holds, found out without reading all of their bytes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import xxhash

from lazysnap.capture.dtypes import stored_form
from lazysnap.capture.plan import CapturePlan
from lazysnap.memory.arena import Slot

_SMALL_BYTES = 4096
"""Of a tensor this small all bytes are compared."""
_SAMPLES = 8
"""Words of each larger tensor that are compared."""
_WORD_BYTES = 8


def is_unchanged(
    plan: CapturePlan, slot: Slot, versions: Sequence[int], tensors: Sequence[torch.Tensor], chosen: Iterable[int]
) -> bool:
    """Whether the ``chosen`` ones of ``tensors``, by their number in ``plan``, are as captured into ``slot``, which is
    whole; ``versions`` are those at the capture. The plan holds for ``tensors`` (``CapturePlan.mismatch``).

    Lazy tensors: by version and by some words of each, since a write through ``.data`` moves no version. All others:
    byte by byte. Blocks: for copying these words and bytes to the host.
    """
    live: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    held: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for index in chosen:
        record, tensor = plan.records[index], tensors[index]
        if record.frozen or record.primary != index or not record.nbytes:
            continue
        if record.lazy and tensor._version != versions[index]:
            return False
        for found, source in ((live, stored_form(tensor)), (held, plan.view(slot, index))):
            flat = source.detach().reshape(-1).view(torch.uint8)
            is_sampled = record.lazy and record.nbytes > _SMALL_BYTES
            found[record.device].append(words_in(record.name, flat).reshape(-1) if is_sampled else flat)
    return all(torch.equal(torch.cat(live[device]).cpu(), torch.cat(held[device])) for device in live)


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
