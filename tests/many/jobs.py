"""Trainings of several ranks, started as processes, and what they wrote down."""

import contextlib
import itertools
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 120
STOPPED = 9
PRELOADED = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.nn.parallel",
    "torch.distributed.checkpoint.state_dict",
    "lazysnap.dcp",
    "lazysnap.engine.engine",
)
"""What takes long to import."""


class Zygote:
    """Starts ranks by forking a process that has torch already: a tenth of a second each, not three."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE.parent / "faults" / "zygote.py"), *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.bytecode = tempfile.mkdtemp(prefix="lazysnap-bytecode-")
        self.answers: dict[int, queue.SimpleQueue[int]] = {}
        self.numbers = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()
        # No deadline of a test is to pass while torch is imported on a busy machine.
        self.start([os.devnull], {}, pathlib.Path(os.devnull)).get(timeout=240)

    def _read(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            self.answers[answer["id"]].put(answer["status"])

    def start(self, args: list[str], env: dict[str, str], output: pathlib.Path) -> "queue.SimpleQueue[int]":
        number = next(self.numbers)
        self.answers[number] = queue.SimpleQueue()
        # Dozens of keepers are started: compiled once, wherever the environment says that nothing is to be written.
        env = {"PYTHONPYCACHEPREFIX": self.bytecode, "PYTHONDONTWRITEBYTECODE": "", **env}
        request = {"id": number, "args": args, "env": env, "output": str(output)}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self.answers[number]

    def close(self) -> None:
        self.process.stdin.close()
        # The end of its input may not reach it: what was forked meanwhile holds the pipe, too.
        self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()
        shutil.rmtree(self.bytecode, ignore_errors=True)


def until(is_so: Callable[[], bool], tell: Callable[[], str], *, timeout_s: float = 40) -> None:
    """Wait for what others do; ``tell`` what it looks like if they do not."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.01)


@dataclass
class Job:
    """One job in a directory of its own; each ``run`` is a start of all its ranks."""

    zygote: Zygote
    root: pathlib.Path
    runs: int = 0
    levels: list[dict] | None = None
    nodes: tuple[str, ...] = ()
    """Names of machines that ranks take themselves to be on."""

    def __post_init__(self) -> None:
        if self.levels is None:
            self.levels = [{"url": str(self.root / "level"), "every_n_steps": 1, "keep_last": 2}]

    @property
    def place(self) -> pathlib.Path:
        return self.root / f"run{self.runs}"

    def run(
        self,
        kind: str,
        world: int,
        *,
        faults: dict[int, str] | None = None,
        spare: bool = False,
        log: bool = False,
        **settings,
    ) -> list[int]:
        """Start all ranks and wait; their exit codes. As a launcher does, the first to fail takes the others along, but
        if they are to be ``spare``d. ``log``: see ``passed``.
        """
        self.runs += 1
        self.place.mkdir(parents=True)
        common = {
            "kind": kind,
            "world": world,
            "meeting": str(self.place / "meeting"),
            "journal": str(self.place / "journal"),
            "result": str(self.place / "result"),
            "steps": 8,
            "levels": self.levels,
            **settings,
        }
        waiting = {}
        for rank in range(world):
            env = {"LAZYSNAP_JOB_ID": str(self.root)}
            if rank in (faults or {}):
                env["LAZYSNAP_FAULT"] = faults[rank]
            if log:
                env["LAZYSNAP_FAULT_LOG"] = str(self.root / f"points.{rank}")
            arguments = [str(HERE / "rank.py"), json.dumps({**common, "rank": rank})]
            waiting[rank] = self.zygote.start(arguments, env, self.place / f"output.{rank}")
        return self._wait(waiting, spare=spare)

    @contextlib.contextmanager
    def held(self, work: Callable[[], None]) -> Iterator[None]:
        """Ranks that ``hold_at`` a step go on when ``work`` is done, beside the next run."""
        place = self.root / f"run{self.runs + 1}"

        def let_go() -> None:
            until(lambda: self.place == place and bool(self.events("held")), self.output)
            work()
            (place / "result-go").touch()

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(let_go)
            yield
            working.result()

    def _wait(self, waiting: dict, *, spare: bool) -> list[int]:
        codes: dict[int, int] = {}
        deadline = time.monotonic() + TIMEOUT_S
        is_over = False
        while len(codes) < len(waiting):
            for rank, answer in waiting.items():
                if rank not in codes:
                    try:
                        codes[rank] = answer.get(timeout=0.01)
                    except queue.Empty:
                        continue
            died = not spare and any(code not in (0, STOPPED) for code in codes.values())
            failed = died or time.monotonic() > deadline
            if failed and not is_over:
                is_over = True
                for _, _, pid in self.events("pid"):
                    try:
                        os.kill(int(pid), signal.SIGKILL)
                    except ProcessLookupError:
                        continue
        return [codes[rank] for rank in sorted(codes)]

    def events(self, word: str) -> list[list[str]]:
        """Lines of the last run's journal with this word, split: rank, word, …"""
        path = self.place / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted(line.split() for line in lines if line.split()[1] == word)

    def resumed(self) -> int:
        """The step that all ranks went on from."""
        [step] = {int(line[2]) for line in self.events("resumed")}
        return step

    def origins(self) -> list[list[str]]:
        """What each rank went on from: step, level, digest of what is common to all."""
        return [line[2:5] for line in self.events("resumed")]

    def stopped(self) -> set[str]:
        """Digests of what is common to all, where the ranks stopped."""
        return {line[3] for line in self.events("stopped")}

    def own(self, word: str) -> list[list[str]]:
        """What each rank alone had when it ``stopped`` or ``resumed``: buffers, what its loop keeps, the next numbers
        that it draws.
        """
        return [line[-3:] for line in self.events(word)]

    def begun(self, rank: int) -> set[int]:
        """Steps of which a rank began to take a snapshot."""
        return {int(line[2]) for line in self.events("begun") if line[0] == str(rank)}

    def passed(self, rank: int) -> Counter[str]:
        """How often a rank and its keeper passed each fault point in all runs that logged it."""
        return Counter((self.root / f"points.{rank}").read_text().splitlines())

    def output(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-4000:]}" for p in sorted(self.place.glob("output.*")))

    def results(self) -> list[str]:
        return [path.read_text() for path in sorted(self.place.glob("result.*"))]
