"""Worlds of processes with gloo: forked from one process that has imported everything, so that each starts at once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
DEADLINE_S = 60.0


class Worlds:
    """Runs functions of ``ranks`` in worlds of any size, one world at a time."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent.parent), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "worlds.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, size: int, job: str, **arguments) -> list:
        """What ``ranks.job(**arguments)`` returned on each rank. Raises: AssertionError, with what a rank raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"size": size, "job": job, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert not answer["errors"], "\n".join(answer["errors"])
        return answer["results"]

    def close(self) -> None:
        """End the process that forks; the worlds have ended before."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()  # the end of its input may not reach it: what was forked meanwhile holds the pipe, too
        self._process.wait(60)
        self._process.stdout.close()


def main() -> None:
    import ranks

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints does not meet the answers
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            children = [fork(ranks, rank, request, folder) for rank in range(request["size"])]
            errors = wait(children)
            results = []
            for rank in range(request["size"]):
                path = Path(folder, f"{rank}.json")
                found = json.loads(path.read_text()) if path.exists() else {"error": "ended without an answer"}
                if "error" in found:
                    errors.append(f"rank {rank}: {found['error']}")
                results.append(found.get("result"))
        print(json.dumps({"errors": errors, "results": results}), file=answers, flush=True)


def fork(ranks, rank: int, request: dict, folder: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        found = {"result": ranks.run(rank, request, folder)}
        code = 0
    except BaseException:  # noqa: BLE001  whatever it is, the test hears of it
        found = {"error": traceback.format_exc()}
    with contextlib.suppress(BaseException):
        partial = Path(folder, f"{rank}.partial")
        partial.write_text(json.dumps(found))
        partial.rename(Path(folder, f"{rank}.json"))
    os._exit(code)


def wait(children: list[int]) -> list[str]:
    """Wait for all, or until the deadline; what then still runs is ended."""
    errors, left, deadline = [], dict(enumerate(children)), time.monotonic() + DEADLINE_S
    while left:
        for rank, child in list(left.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del left[rank]
                if status:
                    errors.append(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")
        if time.monotonic() > deadline:
            for rank, child in left.items():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                errors.append(f"rank {rank} did not end within {DEADLINE_S:g} s")
            left.clear()
        time.sleep(0.005)  # polling children: waitpid has no deadline
    return errors


if __name__ == "__main__":
    main()
