"""What is at a level, as ``lazysnap ls --json`` tells it to users."""

import contextlib
import io
import json
import os
from typing import NamedTuple

from lazysnap.cli import main


class Listed(NamedTuple):
    run_id: str
    step: int
    names: tuple[str, ...]
    location: str


def snapshots_at(place: str | os.PathLike[str]) -> list[Listed]:
    """The complete snapshots there, the newest run first, in each the greatest step."""
    if "://" not in os.fspath(place) and not os.path.isdir(place):
        return []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["ls", os.fspath(place), "--json"])
    answer = json.loads(printed.getvalue())
    assert "error" not in answer, answer
    complete = []
    for row in answer["snapshots"]:
        if row["complete"]:
            complete.append(Listed(row["run_id"], row["step"], tuple(row["names"]), row["location"]))
    return sorted(complete, reverse=True)


def steps_at(place: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete snapshots there, the smallest first."""
    return sorted(snapshot.step for snapshot in snapshots_at(place))


def runs_at(place: str | os.PathLike[str]) -> dict[str, list[int]]:
    """By run, the newest first: the steps of its complete snapshots, the greatest first."""
    runs: dict[str, list[int]] = {}
    for snapshot in snapshots_at(place):
        runs.setdefault(snapshot.run_id, []).append(snapshot.step)
    return runs


def names_at(place: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """The names there, each with the step of the snapshot that has it, in order."""
    return sorted((name, snapshot.step) for snapshot in snapshots_at(place) for name in snapshot.names)


def newest_directory(place: str | os.PathLike[str]) -> str | None:
    """The directory of the newest complete snapshot there; ``None`` if there is none."""
    for snapshot in snapshots_at(place):
        return f"{os.fspath(place)}/{snapshot.location}"
    return None
