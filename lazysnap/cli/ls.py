"""``lazysnap ls``: the snapshots of a level, and what is wrong there."""

import argparse
from typing import Any

from lazysnap.cli.output import Output, fields_of, show_snapshots
from lazysnap.cli.stores import levels_near, open_existing
from lazysnap.snapshots.catalogue import Catalogue, Contents, Found


def run(args: argparse.Namespace, output: Output) -> int:
    """List. Blocks: reads every manifest, no tensors. Raises: LevelError."""
    store = open_existing(args.url, args.storage_option)
    seen = Catalogue(store).contents(run=args.run)
    near = levels_near(store) if seen.is_empty else []
    _print(seen, near, output)
    listed = [
        *(
            {
                **fields_of(found),
                "ranks": found.ranks,
                "world_size": found.world_size,
                "captured_ns": found.captured_ns,
                "complete": found.is_complete,
            }
            for found in seen.snapshots
        ),
        *({**_NOTHING, "location": name, "step": step} for name, step in seen.uncommitted),
    ]
    return output.result(
        url=seen.url,
        newest_run=seen.newest_run,
        snapshots=sorted(listed, key=lambda item: (item["step"], item["location"])),
        problems=seen.problems,
        levels_near=near,
    )


_NOTHING: dict[str, Any] = {
    "run_id": None,
    "size_bytes": 0,
    "names": [],
    "ranks": 0,
    "world_size": 0,
    "captured_ns": 0,
    "complete": False,
}
"""The fields of a directory without a valid manifest."""


def _state_of(found: Found) -> tuple[str, str]:
    """Say in words if a snapshot can be restored from this level alone, with a colour for it."""
    if found.is_complete:
        return "complete", "green"
    return f"{found.ranks} of {found.world_size} ranks", "yellow"


def _print(seen: Contents, near: list[str], output: Output) -> None:
    if seen.is_empty:
        where = "this is a part of the level" if near == [seen.url.rpartition("/")[0]] else "there are levels below"
        output.line(f"no snapshots in {seen.url}" + (f"; {where}: {', '.join(near)}" if near else ""))
    show_snapshots(output, seen, [(found, *_state_of(found)) for found in seen.snapshots], seen.uncommitted)
    for problem in seen.problems:
        output.line(problem, "yellow")
