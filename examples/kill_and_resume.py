"""Kill a real training again and again, resume it, and compare it with a run that was never killed.

    python examples/kill_and_resume.py

Starts `lightning_gpt.py` as a process, kills it with SIGKILL at random (seeded) moments, starts the same
command again; one of the kills takes the keeper too, so that memory is lost and the run resumes from disk.
Exit code 1 if the final weights and optimizer state differ in a single bit from those of an uninterrupted run.
"""

import argparse
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lazysnap import SnapshotConfig
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import peer_credentials

SCRIPT = Path(__file__).parent / "lightning_gpt.py"
STEP = re.compile(r"^step (\d+) loss ([\d.]+)$")
START = re.compile(r"^starting at step (\d+)$")
RESUMED = re.compile(r"^lazysnap\S*: resumed step (\d+) of run \w+ \(.*?\) from (.+?): .*restored in [\d.]+ m?s$")
DONE = re.compile(r"^finished at step (\d+): state sha256 (\w+)$")
SILENCE_S = 120.0
console = Console()


class Training:
    """One start of the training script, and what it printed when."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
        self.output: list[str] = []
        self.times: dict[int, float] = {}  # step -> when its line came
        self.first_step_s: float | None = None
        self.resumed: tuple[int, str] | None = None
        self.digest: str | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.monotonic(), line.rstrip()))
        self._lines.put(None)

    def follow(self, until_step: int | None) -> bool:
        """Read on until a step is reached (True) or the process has ended (False)."""
        while True:
            try:
                item = self._lines.get(timeout=SILENCE_S)
            except queue.Empty:
                self.fail(f"said nothing for {SILENCE_S:.0f} s")
            if item is None:
                if self.process.wait() not in (0, -signal.SIGKILL):
                    self.fail(f"ended with code {self.process.returncode}")
                return False
            self._note(*item)
            if until_step is not None and until_step in self.times:
                return True

    def _note(self, now: float, line: str) -> None:
        self.output.append(line)
        if match := STEP.match(line):
            self.times[int(match[1])] = now
            if self.first_step_s is None:
                self.first_step_s = now - self.started
        elif match := RESUMED.match(line):
            self.resumed = (int(match[1]), "memory" if match[2] == "memory" else "disk")
        elif match := DONE.match(line):
            self.digest = match[2]

    def kill(self) -> float:
        """SIGKILL; then read what it still said. When it was killed."""
        self.process.send_signal(signal.SIGKILL)
        now = time.monotonic()
        self.follow(None)
        return now

    def fail(self, why: str) -> None:
        self.process.kill()
        console.print("\n".join(self.output[-40:]), markup=False)
        raise SystemExit(f"the training {why}; its last lines are above")


@dataclass
class Kill:
    """What one kill cost."""

    victims: str
    at_step: int
    killed: float
    times: dict[int, float] = field(repr=False)
    resumed_step: int = 0
    level: str = "none"
    restart_s: float = 0.0

    @property
    def lost_s(self) -> float:
        """Seconds of work that had to be done again: from the end of the restored step to the kill."""
        return self.killed - self.times.get(self.resumed_step, min(self.times.values()))


def keeper_pid(job_id: str) -> int | None:
    """The process that keeps this job's memory: who listens at the job's socket."""
    identity = JobIdentity.from_config(SnapshotConfig(job_id=job_id))
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(identity.address)
        except ConnectionRefusedError:
            return None
        return peer_credentials(connection)[0]


def run_killed(
    args: argparse.Namespace, arguments: list[str], environment: dict[str, str]
) -> tuple[Training, list[Kill]]:
    """Run to the end, killing at seeded moments on the way."""
    dice = random.Random(args.seed)
    chunk = args.max_steps // (args.kills + 1)
    targets = [chunk * k + dice.randint(chunk // 4, chunk) for k in range(args.kills)]
    kills: list[Kill] = []
    times: dict[int, float] = {}
    for number in range(args.kills + 1):
        training = Training(arguments, environment)
        target = targets[number] if number < args.kills else None
        reached = training.follow(target)
        if reached:
            time.sleep(dice.uniform(0, 0.1))  # anywhere within a step, not just after its line
            both = number == args.kills // 2
            keeper = keeper_pid(environment["LAZYSNAP_JOB_ID"]) if both else None
            if both and keeper is None:
                training.fail("runs without a keeper, there is none to kill")
            if keeper is not None:
                os.kill(keeper, signal.SIGKILL)
            killed = training.kill()
        if kills:
            kills[-1].resumed_step, kills[-1].level = training.resumed or (0, "nothing: started again")
            kills[-1].restart_s = training.first_step_s or 0.0
        times = {**times, **training.times}
        if reached:
            victims = "trainer + keeper" if both else "trainer"
            kills.append(Kill(victims, max(training.times), killed, dict(times)))
            console.print(f"  killed the {victims} at step {kills[-1].at_step}")
        else:
            break
    return training, kills


def report(kills: list[Kill]) -> None:
    """The table of kills."""
    table = Table(title="every kill, and what it cost")
    for column in (
        "kill -9",
        "at step",
        "resumed from step",
        "level",
        "steps lost",
        "seconds lost",
        "restart (s)",
    ):
        table.add_column(column, justify="left" if column in ("kill -9", "level") else "right")
    for kill in kills:
        lost = str(kill.at_step - kill.resumed_step)
        table.add_row(
            kill.victims,
            str(kill.at_step),
            str(kill.resumed_step),
            kill.level,
            lost,
            f"{kill.lost_s:.2f}",
            f"{kill.restart_s:.1f}",
        )
    console.print(table)
    console.print(
        "seconds lost: work done again. restart: from the start of the process to its first new step, "
        "most of it importing PyTorch and Lightning."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1603)
    parser.add_argument("--size", default="small")
    args = parser.parse_args()
    if not 0 < args.kills < args.max_steps // 4:
        parser.error("--kills must be at least 1, and leave four steps for each")

    common = ["--max-steps", str(args.max_steps), "--size", args.size]
    with tempfile.TemporaryDirectory(prefix="lazysnap-demo-") as directory:
        # A job id of its own: the demo meets no other job of this user.
        environment = {**os.environ, "LAZYSNAP_JOB_ID": f"demo-{os.getpid()}"}
        console.print(f"[bold]1. {args.max_steps} steps without lazysnap, never killed")
        reference = Training([*common, "--no-snapshots"], environment)
        reference.follow(None)
        console.print(f"[bold]2. the same with a snapshot at every step, killed {args.kills} times")
        persist_every = max(args.max_steps // 20, 1)
        arguments = [*common, "--dirpath", directory, "--persist-every-n-steps", str(persist_every)]
        training, kills = run_killed(args, arguments, environment)
    report(kills)
    equal = reference.digest is not None and reference.digest == training.digest
    console.print(f"never killed: {reference.digest}\nkilled:       {training.digest}", highlight=False)
    console.print(
        f"[bold green]weights and optimizer state are equal bit for bit after {len(kills)} kills"
        if equal
        else "[bold red]weights or optimizer state DIFFER from the run that was never killed"
    )
    resumed = all(kill.resumed_step > 0 for kill in kills)
    if not resumed:
        console.print("[bold red]a restart did not resume")
    return 0 if equal and resumed and len(kills) == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
