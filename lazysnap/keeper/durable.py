"""What a trainer knows to be durable of its own part, by level."""

from collections import defaultdict
from collections.abc import Iterable

from lazysnap.keeper.protocol import Durable, LevelFailed, Message

_REMEMBERED = 8


class DurableSteps:
    """Of one run, and of captures that began after it was adopted. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[int, int]] = defaultdict(dict)
        """By level: the last few, by the sequence numbers of their captures."""
        self._run_id: str | None = None
        self._floor = 0

    def adopt(self, run_id: str, newest_sequence: int) -> None:
        """Forget what was before: what an earlier attempt got to storage does not make this one's steps safe."""
        self._run_id, self._floor = run_id, newest_sequence
        self._steps.clear()

    def confirm(self, urls: Iterable[str], sequence: int, step: int) -> None:
        """The keeper answered that a capture of this run is committed at those levels."""
        for url in urls:
            self._note(url, sequence, step)

    def _note(self, url: str, sequence: int, step: int) -> None:
        steps = self._steps[url]
        steps[sequence] = step
        if len(steps) > _REMEMBERED:
            del steps[min(steps)]

    def hear(self, message: Message) -> None:
        """The keeper said something: that a snapshot was committed, or that one that was is read back damaged."""
        if isinstance(message, Durable):
            if self._run_id in (None, message.run_id) and message.sequence > self._floor:
                self._note(message.level, message.sequence, message.step)
        elif isinstance(message, LevelFailed):
            self._steps[message.level].pop(message.sequence, None)

    def newest(self, url: str) -> int:
        """The step of the last capture at a level, which may come there before older ones; -1 if there is none."""
        steps = self._steps[url]
        return steps[max(steps)] if steps else -1
