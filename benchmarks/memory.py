"""Memory of several processes together, pages that they share counted once."""

import os
import threading
from pathlib import Path

MARKER = "LAZYSNAP_STALL_RUN"


def processes(run: str) -> list[int]:
    """All processes with this run's marker in their environment: children, and the keeper."""
    wanted = f"{MARKER}={run}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:  # gone meanwhile, or of another user
                continue
    return found


def proportional_bytes(pid: int) -> int:
    """PSS: a page mapped by n processes counts 1/n, so a sum over processes counts it once."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # gone meanwhile
        pass
    return 0


class PeakMemory:
    """Samples the sum of PSS over a run's processes in a thread; page cache is not in it."""

    def __init__(self, run: str, interval_s: float) -> None:
        self.peak_bytes = 0
        self._run, self._interval_s = run, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            total = sum(proportional_bytes(pid) for pid in processes(self._run))
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> int:
        """The peak in bytes."""
        self._stop.set()
        self._thread.join(30)
        return self.peak_bytes
