"""A training of one process that is killed and started again."""

import pathlib
from dataclasses import dataclass
from typing import Any

from support.keepers import keeper_of
from support.zygote import Child, Zygote

from lazysnap.config import SnapshotConfig
from lazysnap.keeper.identity import JobIdentity

HERE = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """One training of one process in a directory of its own: ``trainer.py``."""

    zygote: Zygote
    place: pathlib.Path
    steps: int

    def start(self, *, fault: str | None = None, log: pathlib.Path | None = None) -> Child:
        self.place.mkdir(exist_ok=True)
        environment = {"LAZYSNAP_JOB_ID": str(self.place)}
        if fault:
            environment["LAZYSNAP_FAULT"] = fault
        if log:
            environment["LAZYSNAP_FAULT_LOG"] = str(log)
        return self.zygote.start(self.arguments(), environment, self.place / "output")

    def arguments(self) -> list[str]:
        paths = [str(self.place / "snapshots"), str(self.steps), str(self.journal), str(self.result)]
        return [str(HERE / "trainer.py"), *paths]

    def run(self, **settings: Any) -> int:
        return self.start(**settings).get()

    @property
    def output(self) -> str:
        return (self.place / "output").read_text()[-3000:]

    @property
    def journal(self) -> pathlib.Path:
        return self.place / "journal"

    @property
    def result(self) -> pathlib.Path:
        return self.place / "result"

    def events(self) -> list[list[str]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [line.split() for line in lines]

    def newest(self, word: str) -> int:
        """The greatest step of all lines with this word."""
        return max((int(line[1]) for line in self.events() if line[0] == word), default=0)

    def keeper(self) -> int | None:
        """Its process."""
        return keeper_of(JobIdentity.from_config(SnapshotConfig(job_id=str(self.place))))
