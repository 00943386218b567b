"""Whether live tensors still are what a capture holds, found out without reading all of their bytes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from lazysnap.capture.dtypes import stored_form
from lazysnap.capture.plan import CapturePlan
from lazysnap.capture.samples import words_in
from lazysnap.memory.arena import Slot

_SMALL_BYTES = 4096
"""Of a tensor this small all bytes are compared."""


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
