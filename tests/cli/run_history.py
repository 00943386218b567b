"""Histories of runs: what really happened, and the events that keepers write of it."""

from dataclasses import dataclass

from lazysnap.events import (
    Complete,
    EventFile,
    KeeperStarted,
    Progress,
    Stored,
    TrainerEnded,
    TrainerStarted,
)

RUN = "0123456789abcdef"
BEGAN = 1_800_000_000.0
LEVEL = "/data/run"


@dataclass
class Life:
    """One start: seconds until it names its run, of a step and of a wait, how many steps it passes, how it ends."""

    steps: int
    step_s: float = 1.0
    wait_s: float = 0.0
    named_s: float = 2.5
    first_s: float = 0.5
    """Beside the time of a step."""
    partial_s: float = 0.25
    """After the last boundary."""
    how: str | None = "died"
    """``None``: with the keeper, and its last line."""
    back: int = 0
    """The steps that the next start trains again."""
    down_s: float = 3.0


class History:
    """Plays some lives, one after the other. ``seconds`` is the truth; ``file`` the events of node 0."""

    def __init__(self, lives, *, sample_s=1.0):
        self.now = BEGAN
        self.sample_s = sample_s
        self.events = [self.keeper()]
        self.seconds = dict.fromkeys(("productive", "waiting", "setup", "lost", "down", "restarting", "draining"), 0.0)
        self.done = []  # of each step that counts: work, waiting
        self.has_keeper = True
        for number, life in enumerate(lives):
            self.live(number, life, is_last=number == len(lives) - 1)
        self.seconds["productive"] = sum(work for work, _ in self.done)
        self.seconds["waiting"] = sum(waited for _, waited in self.done)
        self.events.sort(key=lambda event: event.t)

    @property
    def file(self):
        return EventFile(RUN, 0, tuple(self.events))

    def keeper(self):
        return KeeperStarted(t=self.now, nodes=1)

    def live(self, number, life, *, is_last):
        began, name, resumed = self.now, f"{number:04d}", len(self.done)
        self.now += life.named_s
        if not self.has_keeper:  # its first line is written when the trainer names its run
            self.events.append(self.keeper())
        self.events.append(
            TrainerStarted(
                t=self.now,
                rank=0,
                start=name,
                step=resumed,
                world_size=1,
                every_n_steps=1,
                began=began,
            )
        )
        self.seconds["restarting" if number else "setup"] += self.now - began
        if life.steps:
            self.now += life.first_s
            self.seconds["restarting" if number else "setup"] += life.first_s
        waited, sampled = 0.0, self.now
        for index in range(life.steps):
            wait = life.wait_s if index else 0.0
            self.now += wait + life.step_s
            waited += wait
            self.done.append((life.step_s, wait))
            if index == 0 or self.now - sampled >= self.sample_s:
                sampled = self.now
                room = life.partial_s if index == life.steps - 1 else life.step_s
                self.sample(name, waited, self.now + min(0.4, room / 2))
        if life.steps and life.partial_s >= self.sample_s:
            self.sample(name, waited, self.now + self.sample_s)
        reached = len(self.done)
        self.now += life.partial_s
        if life.how == "goodbye":
            self.seconds["draining"] += life.partial_s
        else:
            self.seconds["lost" if life.steps else "restarting" if number else "setup"] += life.partial_s
        if life.how is not None:
            end = TrainerEnded(t=self.now, rank=0, start=name, step=reached, how=life.how)
            self.events.append(end)
        if is_last:
            return
        for _ in range(min(life.back, reached)):
            self.seconds["lost"] += sum(self.done.pop())
        self.now += life.down_s
        self.seconds["down"] += life.down_s
        self.has_keeper = life.how is not None

    def sample(self, name, waited, now):
        step = len(self.done)
        self.events += [
            Progress(
                t=now,
                rank=0,
                start=name,
                step=step,
                waited_s=waited,
                captured=step,
                taken=self.now,
                copy_s=0.005,
            ),
            Stored(t=now, level=LEVEL, step=step, bytes=1000, seconds=0.01),
            Complete(t=now, level=LEVEL, steps=[step]),
        ]
