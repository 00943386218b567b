"""What a trainer knows to be durable of its own part, by level."""

from lazysnap.keeper.events import Durable


class DurableSteps:
    """Of one run, and of captures that began after it was adopted. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._run_id: str | None = None
        self._floor = 0

    def adopt(self, run_id: str, newest_sequence: int) -> None:
        """Forget what was before: what an earlier attempt got to storage does not make this one's steps safe."""
        self._run_id, self._floor = run_id, newest_sequence
        self._steps.clear()

    def note(self, event: Durable, run_id: str) -> None:
        """A snapshot was committed."""
        if self._run_id in (None, run_id) and event.sequence > self._floor:
            self._steps[event.level] = event.step

    def newest(self, url: str) -> int:
        """The last step at a level; -1 if there is none."""
        return self._steps.get(url, -1)
