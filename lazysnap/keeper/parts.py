"""What a keeper holds of a snapshot that the first keeper of its node writes, and what it is told became of it.

::

    lead's keeper            this one
      gather ────────────────>            the part of one capture, for one level
             <──────────────── part       a slot, whole or still filling; or a file at a faster level
             <──────────────── no_part    there is none, and never will be
      moving ────────────────>            it is still at it
      gathered ──────────────>            committed, or failed
             <──────────────── is_done    what became of these? and is there anything more to come?
      done ──────────────────>
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lazysnap.arena import SlotPhase
from lazysnap.errors import FormatError
from lazysnap.keeper.messages import Connection, Message
from lazysnap.shard.manifest import CaptureMeta, is_count, is_run_id, parse_directory_name
from lazysnap.shard.stem import Stem

if TYPE_CHECKING:
    from lazysnap.keeper.persist import Persister

logger = logging.getLogger(__name__)

_REMEMBERED = 64


@dataclass(frozen=True, order=True)
class CaptureKey:
    """One capture of all ranks. Later ones are greater: a generation tells when the ranks started."""

    generation: str
    run_id: str
    step: int

    @classmethod
    def of(cls, meta: CaptureMeta) -> "CaptureKey":
        """From what a slot or a manifest says."""
        return cls(meta.generation or "", meta.run_id, meta.step)

    @classmethod
    def from_message(cls, message: Message) -> "CaptureKey":
        """Raises: KeyError, TypeError, ValueError."""
        generation, run_id, step = message["generation"], message["run_id"], message["step"]
        if not is_run_id(run_id) or not (generation == "" or is_run_id(generation)) or not is_count(step):
            raise ValueError(f"no capture: step {step!r:.30} of {run_id!r:.30}, {generation!r:.30}")
        return cls(generation, run_id, step)

    def fields(self) -> dict[str, Any]:
        """For a message."""
        return {"run_id": self.run_id, "generation": self.generation, "step": self.step}


@dataclass(frozen=True)
class Outcome:
    """What became of a capture at a level."""

    text: str = ""
    """Why it failed; empty: it is committed."""
    location: str = ""
    """The snapshot's directory."""
    file: str = ""
    """What the names of the node's files there begin with."""
    seconds: float = 0.0

    def fields(self) -> dict[str, Any]:
        """For a message."""
        return dict(vars(self))

    @classmethod
    def from_message(cls, message: Message) -> "Outcome":
        """Raises: KeyError, TypeError, ValueError."""
        text, location, file, seconds = (message[name] for name in ("text", "location", "file", "seconds"))
        if not isinstance(text, str):
            raise ValueError(f"no reason: {text!r:.50}")
        if text:
            return cls(text)
        stem = Stem.parse(file)
        if stem is None or not stem.is_node or parse_directory_name(location) != CaptureKey.from_message(message).step:
            raise ValueError(f"no file of a node: {location!r:.50}, {file!r:.50}")
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
            raise ValueError(f"no duration: {seconds!r:.50}")
        return cls("", location, file, seconds)


@dataclass(frozen=True)
class Known:
    """What the lead's keeper answers to ``is_done``."""

    is_done: bool
    """Whether nothing more is to come."""
    outcomes: Mapping[CaptureKey, Outcome] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Message) -> "Known":
        """Raises: KeyError, TypeError, ValueError."""
        if message["type"] != "done" or not isinstance(message["done"], bool):
            raise ValueError(f"no answer: {message['type']!r:.50}")
        told = {CaptureKey.from_message(item): Outcome.from_message(item) for item in message["outcomes"]}
        return cls(message["done"], told)


class News:
    """What the lead's keeper said, by level. Used under the persister's lock."""

    def __init__(self) -> None:
        self._outcomes: dict[str, dict[CaptureKey, Outcome]] = defaultdict(dict)
        self._signs: dict[str, dict[CaptureKey, float]] = defaultdict(dict)

    def outcome(self, url: str, key: CaptureKey) -> Outcome | None:
        """What became of it, if that was told."""
        return self._outcomes[url].get(key)

    def passed_s(self, url: str, key: CaptureKey) -> float | None:
        """How long ago the lead, which goes in order, was done with a later one; ``None``: it was not.

        One that took a dead one's place may get to know its slots in another order, and come back.
        """
        later = [self._signs[url].get(other, 0.0) for other in self._outcomes[url] if other > key]
        return time.monotonic() - min(later) if later else None

    def last_sign(self, url: str, key: CaptureKey) -> float:
        """When the lead was last heard to be at it, or at an earlier one (``time.monotonic``)."""
        return max((at for other, at in self._signs[url].items() if other <= key), default=0.0)

    def hear_sign(self, url: str, key: CaptureKey) -> None:
        """It is at it."""
        _remember(self._signs[url], key, time.monotonic())

    def hear_outcome(self, url: str, key: CaptureKey, outcome: Outcome) -> None:
        """It is done."""
        self.hear_sign(url, key)
        _remember(self._outcomes[url], key, outcome)

    def forget_failures(self) -> None:
        """What failed may be tried again."""
        for outcomes in self._outcomes.values():
            for key in [key for key, outcome in outcomes.items() if outcome.text]:
                del outcomes[key]


def _remember(known: dict[CaptureKey, Any], key: CaptureKey, value: Any) -> None:
    known.pop(key, None)
    known[key] = value
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]


class Desk:
    """Answers the lead's keeper; all on the main thread."""

    def __init__(self, persister: Callable[[], "Persister"], is_training: Callable[[], bool]) -> None:
        """``is_training``: whether a trainer may still make captures."""
        self._persister = persister
        self._is_training = is_training
        self._asked: list[tuple[Connection, str, CaptureKey]] = []

    def take(self, connection: Connection, message: Message) -> None:
        """A message of another keeper. Raises: KeyError, TypeError, ValueError, if it is none of this protocol."""
        persister = self._persister()
        url, key = str(message["level"]), CaptureKey.from_message(message)
        with persister.changed:
            if message["type"] == "gathered":
                persister.news.hear_outcome(url, key, Outcome.from_message(message))
                persister.changed.notify_all()
                return
            persister.news.hear_sign(url, key)
        if message["type"] == "gather":
            self._asked.append((connection, url, key))

    def known(self, message: Message) -> Message:
        """The answer to a keeper for which this one is the lead. Raises: KeyError, TypeError, ValueError."""
        persister, outcomes = self._persister(), []
        with persister.changed:
            for fields in message["keys"]:
                outcome = persister.news.outcome(str(message["level"]), CaptureKey.from_message(fields))
                if outcome is not None:
                    outcomes.append({**fields, **outcome.fields()})
        is_done = not self._is_training() and persister.is_drained()
        return {"type": "done", "done": is_done, "outcomes": outcomes}

    def answer(self) -> None:
        """Answer what can be answered by now. Blocks: as long as a short message takes."""
        for asked in list(self._asked):
            connection, url, key = asked
            try:
                if connection.is_closed or self._answer(connection, url, key):
                    self._asked.remove(asked)
            except OSError as error:
                logger.info("the lead's keeper is gone: %s", error)
                self._asked.remove(asked)

    def _answer(self, connection: Connection, url: str, key: CaptureKey) -> bool:
        persister = self._persister()
        if not persister.levels and self._is_training():
            return False  # its trainer is about to come
        answer: Message = {"type": "part", "level": url}
        if not any(level.url == url and persister.team.gathers(level) for level in persister.levels):
            connection.send({"type": "no_part", "text": "it has no such level"})
            return True
        with persister.changed:
            item = persister.file_of(key)
            found = None if item is not None else persister.slot_of(key)
            if found is not None and persister.will_have_file(found[0], url):
                return False  # when a faster level has it, the slot is let go: the lead might read it for long
        if item is not None:
            frozen = item.entry.frozen
            answer |= {"url": item.entry.level, "location": item.entry.location, "rank": item.entry.rank}
            fds: tuple[int, ...] = ()
        elif found is not None:
            slot, meta, sequence = found
            frozen = None if meta.frozen is None else meta.frozen.digest
            answer |= {"url": None, "sequence": sequence}
            fds = (slot.fd,)
        else:
            if not self._is_training() or persister.is_past(key):
                connection.send({"type": "no_part", "text": f"it has not captured step {key.step}, or has dropped it"})
                return True
            return False
        image = None if frozen is None else persister.frozen(frozen)
        connection.send({**answer, "frozen": image is not None}, fds if image is None else (*fds, image.fd))
        return True


def phase_counts(phase: SlotPhase) -> bool:
    """Whether a slot in that phase has something to write."""
    return phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)


def meta_in(read: Callable[[], bytes]) -> CaptureMeta | None:
    """What a slot says of its capture, ``None`` if one is just being started."""
    try:
        return CaptureMeta.from_bytes(read())
    except FormatError:
        return None
