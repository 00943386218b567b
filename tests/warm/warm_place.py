"""Where tests start programs, cold and warm."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
from support.waiting import until

HERE = Path(__file__).parent
LAZYSNAP = str(Path(sys.executable).with_name("lazysnap"))
MARK = "LAZYSNAP_TEST_OF"


class Place:
    """Starts programs in a directory of their own, and finds all processes that come of it."""

    def __init__(self, directory):
        self.directory = directory
        packages = directory / "site-packages"
        packages.mkdir()
        self.packages = packages
        # The parents of each test are its own.
        self.environ = {**os.environ, MARK: str(directory), "LAZYSNAP_RUNTIME_DIR": f"{directory}/lazysnap-warm"}
        self.environ["PYTHONPATH"] = os.pathsep.join([str(packages), os.environ["PYTHONPATH"]])
        self.started = []

    def write(self, name, text):
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def start(self, *words, **how):
        how = {"cwd": self.directory, "env": self.environ, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        self.started.append(subprocess.Popen(words, text=True, **how))
        return self.started[-1]

    def run(self, *words, **how):
        """Its exit code, and what it said."""
        process = self.start(*words, **how)
        out, err = process.communicate(timeout=120)
        return process.returncode, out or "", err or ""

    def warm(self, *words, options=("--max-restarts", "0"), **how):
        return self.run(LAZYSNAP, "run", *options, "--", *words, **how)

    def read(self, name):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.directory / name).read_text())

    def processes(self):
        """All that live, of whatever was started here."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.directory) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self):
        until(lambda: not self.processes(), lambda: str([one.cmdline() for one in self.processes()]))
