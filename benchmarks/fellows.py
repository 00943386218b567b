"""All other ranks of a training, made up: each answers what this one says, with its own number and node; for scale.py.

What this rank says, and what it does with the answers, is the package's own code.
"""

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import imagined

from lazysnap.engine.world import World

NEXT_TO_LAST = "00000000000000cc"
"""The start of what one rank's memory holds: that of a start before, so nothing in memory is whole."""


class Fellows(World):
    """A ``World`` whose ranks are all here."""

    def __init__(self, ranks: int, rank: int, listing: Callable[[], Any] = list) -> None:
        """``listing``: what rank 0 says that storage has, where this is another one."""
        self._timeout = datetime.timedelta(seconds=60)
        self.rank, self.size = rank, ranks
        self._group: Any = None
        self._shares: bool | None = None
        self._lost = None
        self.exchanges = 0
        self._listing = listing
        self.said: list[tuple[str, Any]] = []
        """What this rank told the others: at what, and the words."""
        self.told_bytes = 0
        """Of all answers."""
        self.made_up_s = 0.0
        """Processor time that was spent on making them up."""

    def exchange(self, what: str, value: Any) -> list[Any]:
        """See ``World.exchange``."""
        self.exchanges += 1
        self.said.append((what, value))
        text = dumped([what, value])
        started = time.process_time()
        texts = self._answers(what, value, text)
        self.made_up_s += time.process_time() - started
        self.told_bytes += sum(map(len, texts))
        return [item for _, item in map(json.loads, texts)]

    def exchange_after(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """See ``World.exchange_after``."""
        return self.exchange(what, work())

    def has_board(self) -> bool:
        """See ``World.has_board``."""
        return True

    def _answers(self, what: str, value: Any, text: str) -> list[str]:
        nodes = imagined.nodes(self.size)
        if what == "making the engine" and isinstance(value, str):
            return [dumped([what, node]) for node in nodes]
        if what == "what is on storage":
            lists = text if self.rank == 0 else dumped([what, self._listing()])
            return [lists, *[dumped([what, []])] * (self.size - 1)]
        answers = []
        for other, node in enumerate(nodes):
            # A rank of twice as many takes two shares of the work.
            answer = text.replace(f'"rank":{self.rank},', f'"rank":{other},')
            answer = answer.replace(f'"rank":{self.rank + self.size},', f'"rank":{other + self.size},')
            answers.append(answer.replace(nodes[self.rank], node))
        if what == "what is in memory":
            other = (self.rank + 1) % self.size
            answers[other] = answers[other].replace(imagined.START, NEXT_TO_LAST)
        return answers


def dumped(value: Any) -> str:
    """As ``World.exchange`` writes it."""
    return json.dumps(value, separators=(",", ":"))
