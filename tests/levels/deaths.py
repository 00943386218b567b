"""Work at levels in forks of one process, each of which may die at a fault point.

``deaths.py MODULE`` calls ``work(root)`` of that module for each line on stdin: root, fault, log of points passed.
"""

import importlib
import os
import pathlib
import subprocess
import sys

from lazysnap import faults

HERE = pathlib.Path(__file__).parent


def run_forks(module, cases):
    """How each fork ended. ``cases``: root, fault, log of points."""
    paths = os.pathsep.join([str(HERE.parent / "servers"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, module],
        input="".join("\t".join(map(str, case)) + "\n" for case in cases),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def main():
    work = importlib.import_module(sys.argv[1]).work
    for line in sys.stdin:
        root, spec, log = line[:-1].split("\t")
        pid = os.fork()
        if not pid:
            faults._ARMED, faults._SPEC, faults._LOG_PATH = True, spec, log
            work(root)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
