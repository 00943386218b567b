"""Namespaces without a name: they are gone with the processes in them."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

TIMEOUT_S = 30.0
"""Longer than anything takes here."""


class Space:
    """Namespaces, and the process that holds them."""

    def __init__(self, kinds: str, script: str, facts: Mapping[str, str]) -> None:
        """``kinds``: as options of ``unshare``. The script says its number and then waits for the end of its input."""
        command = ["unshare", *(["-f"] if "p" in kinds else []), f"-{kinds}", "sh", "-c", script]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # In a session of its own: Ctrl-C is for the tests.
        self._process = subprocess.Popen(command, env={**os.environ, **facts}, start_new_session=True, **pipes)
        assert self._process.stdout is not None
        told = self._process.stdout.readline()
        assert told, self._process.communicate(timeout=TIMEOUT_S)[1].decode()
        self.pid = int(told)
        self._entry = ["nsenter", "-t", str(self.pid), *(f"-{kind}" for kind in kinds), "--"]

    def popen(self, command: Sequence[str], **options: object) -> "subprocess.Popen[bytes]":
        """Start a process in it."""
        return subprocess.Popen([*self._entry, *command], **options)

    def do(self, line: str) -> None:
        """Words that are a command which must work."""
        process = self.popen(line.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, f"{line}: {output.decode()}"

    def end(self) -> None:
        """Kill what is in it; if it has processes of its own, all of them. Harmless twice."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.communicate(timeout=TIMEOUT_S)
