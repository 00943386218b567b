"""What a trainer knows to be durable, by level."""

from lazysnap.keeper.protocol import Complete

_REMEMBERED = 1024


class DurableSteps:
    """Of the start that goes on. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: dict[str, set[int]] = {}
        self._start = ""

    def adopt(self, start: str) -> None:
        """Forget what was before: what an earlier attempt got to storage does not make this one's steps safe."""
        self._start, self._steps = start, {}

    def hear(self, event: Complete) -> list[int]:
        """What of it is news, oldest first."""
        if event.start != self._start:
            return []
        known = self._steps.setdefault(event.level, set())
        news = sorted(set(event.steps) - known)
        known.update(news)
        if len(known) > 2 * _REMEMBERED:
            self._steps[event.level] = set(sorted(known)[-_REMEMBERED:])
        return news

    def newest(self, url: str) -> int:
        """The greatest step at a level; -1 if there is none."""
        return max(self._steps.get(url, ()), default=-1)
