"""Events from a keeper to its trainer, and the trainer's record of them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from msgspec.structs import asdict

from lazysnap.events import Event
from lazysnap.keeper.held import Captured, HeldParity, TrainerEnd
from lazysnap.keeper.protocol import Inventory, MemoryRefused, SlotName
from lazysnap.memory.arena import Slot

_REMEMBERED = 1024


class MemoryEntry(Captured, frozen=True, kw_only=True):
    """A whole capture that the keeper holds, and its slot."""

    slot: Slot


@dataclass(frozen=True)
class MemoryInventory:
    """The keeper's contents: whole captures, and whole files of frozen tensors by their digest."""

    entries: tuple[MemoryEntry, ...] = ()
    frozen: Mapping[str, Slot] = field(default_factory=dict)
    end: TrainerEnd | None = None
    """The end of the last trainer."""
    local_ranks: tuple[int, ...] = ()
    """The ranks for which the keeper holds anything, this one included."""
    parity: tuple[HeldParity, ...] = ()
    """The parity that the node holds for others; only for the first rank of a node."""

    @classmethod
    def of(cls, told: Inventory, slot: Callable[[SlotName], Slot | None]) -> "MemoryInventory":
        """Return the contents of a keeper's answer, without the slots that cannot be mapped."""
        found = [(held, slot(held.slot)) for held in told.entries]
        files = [(digest, slot(digest)) for digest in told.frozen]
        return cls(
            tuple(MemoryEntry(**{**asdict(held), "slot": slot}) for held, slot in found if slot is not None),
            {digest: slot for digest, slot in files if slot is not None},
            told.end,
            tuple(told.local_ranks),
            tuple(told.parity),
        )


@dataclass(frozen=True)
class KeeperLost:
    """The connection to the keeper ended; another keeper is being started."""


@dataclass(frozen=True)
class KeeperUnreachable:
    """No keeper could be started or reached; nobody tries again until captures are asked for."""

    text: str
    is_refusal: bool = False
    """See ``KeeperClient.refusal``: whoever waits for memory ends with that error."""


@dataclass(frozen=True)
class KeeperReady:
    """A keeper is attached."""


@dataclass(frozen=True)
class KeeperSilent:
    """The keeper seems to live, and does not answer."""

    text: str


@dataclass(frozen=True)
class KeeperAnswers:
    """The keeper, which was silent, answers again."""

    pid: int


KeeperEvent = Event | MemoryRefused | KeeperLost | KeeperUnreachable | KeeperReady | KeeperSilent | KeeperAnswers


class DurableSteps:
    """The durable steps of one start that a trainer knows, by level. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: dict[str, set[int]] = {}
        """The newest of each level."""
        self._forgotten: dict[str, int] = {}
        """The newest step of each level that is not in ``_steps`` any more. By then an older one is stored, or lost:
        memory does not hold it."""

    def add(self, url: str, steps: Collection[int]) -> list[int]:
        """Return the steps that are new, oldest first."""
        known = self._steps.setdefault(url, set())
        news = sorted(step for step in {*steps} - known if step > self._forgotten.get(url, -1))
        known.update(news)
        if len(known) > 2 * _REMEMBERED:
            older = sorted(known)[:-_REMEMBERED]
            known.difference_update(older)
            self._forgotten[url] = older[-1]
        return news

    def newest(self, url: str) -> int:
        """The greatest step at a level; -1 if there is none."""
        return max(self._steps.get(url, ()), default=-1)
