"""Trainings of several ranks, started as processes, and what they wrote down."""

import contextlib
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from support.waiting import until
from support.zygote import Zygote, ended

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 240
STOPPED = 9


def is_of_keeper(point: str) -> bool:
    """Whether a fault point is passed by keepers."""
    return point.startswith(("keeper.", "level."))


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
        by_rank = settings.get("by_rank", {})
        nodes = {rank: by_rank.get(str(rank), {}).get("node") for rank in range(world)}
        # One keeper serves all ranks of a node, and has the environment of whichever starts it.
        of_keeper = {nodes[rank]: fault for rank, fault in (faults or {}).items() if is_of_keeper(fault)}
        started = []
        for rank in range(world):
            env = {"LAZYSNAP_JOB_ID": str(self.root)}
            if fault := (faults or {}).get(rank, of_keeper.get(nodes[rank])):
                env["LAZYSNAP_FAULT"] = fault
            if log:
                env["LAZYSNAP_FAULT_LOG"] = str(self.root / f"points.{rank}")
            arguments = [str(HERE / "rank.py"), json.dumps({**common, "rank": rank})]
            started.append(self.zygote.start(arguments, env, self.place / f"output.{rank}"))
        return ended(started, TIMEOUT_S, lambda code: spare or code in (0, STOPPED))

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
        """How often a rank, or the keeper that it started, passed each fault point in all runs that logged it."""
        return Counter((self.root / f"points.{rank}").read_text().splitlines())

    def output(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-4000:]}" for p in sorted(self.place.glob("output.*")))

    def results(self) -> list[str]:
        return [path.read_text() for path in sorted(self.place.glob("result.*"))]
