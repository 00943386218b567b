"""``lazysnap ls``: the snapshots of a level, and what is wrong there."""

import argparse

from rich.filesize import decimal

from lazysnap.cli.output import OK, Output, when
from lazysnap.cli.places import levels_near, open_existing
from lazysnap.snapshots.catalogue import Catalogue, Contents, Found


def run(args: argparse.Namespace, output: Output) -> int:
    """List. Blocks: reads every manifest, no shard. Raises: LevelError."""
    store = open_existing(args.url, args.storage_option)
    catalogue = Catalogue(store)
    seen = catalogue.contents().of_run(None if args.run is None else catalogue.run_of(args.run))
    near = [] if _has_anything(seen) else levels_near(store)
    uncommitted = [
        {"location": name, "locations": [name], "step": step, "run_id": None} for name, step in seen.uncommitted
    ]
    frozen = [
        {
            "location": image.location,
            "digest": image.digest,
            "size_bytes": manifest.size_bytes,
            "references": seen.references(image),
        }
        for image, manifest in seen.frozen
    ]
    output.result(
        {
            "command": "ls",
            "ok": True,
            "url": seen.url,
            "newest_run": seen.newest_run,
            "snapshots": sorted(
                [*(_fields(seen, found) for found in seen.snapshots), *({**_EMPTY, **item} for item in uncommitted)],
                key=lambda item: (item["step"], item["location"]),
            ),
            "frozen": frozen,
            "problems": list(seen.inventory.problems),
            "levels_near": near,
        }
    )
    _print(seen, near, output)
    return OK


def _has_anything(seen: Contents) -> bool:
    return bool(seen.snapshots or seen.uncommitted or seen.frozen)


_EMPTY = {"ranks": 0, "world_size": 0, "size_bytes": 0, "captured_ns": 0, "names": [], "frozen": [], "complete": False}


def _fields(seen: Contents, found: Found) -> dict[str, object]:
    return {
        "location": found.locations[0],
        "locations": found.locations,
        "step": found.step,
        "run_id": found.run_id,
        "ranks": found.ranks,
        "world_size": found.world_size,
        "size_bytes": found.size_bytes,
        "captured_ns": found.captured_ns,
        "names": found.names,
        "frozen": found.frozen,
        "complete": found.is_complete,
    }


def state_of(found: Found) -> tuple[str, str]:
    """In a word, whether a snapshot can be restored from its level alone; and the colour for it."""
    if found.is_complete:
        return "complete", "green"
    if found.ranks < found.world_size:
        return f"{found.ranks} of {found.world_size} ranks", "yellow"
    return "without its immutable tensors", "yellow"


def _run(seen: Contents, run_id: str) -> str:
    return seen.runs[run_id] + (" (newest)" if run_id == seen.newest_run else "")


def _print(seen: Contents, near: list[str], output: Output) -> None:
    if not _has_anything(seen):
        where = "this is a part of the level" if near == [seen.url.rpartition("/")[0]] else "there are levels below"
        output.line(f"no snapshots in {seen.url}" + (f"; {where}: {', '.join(near)}" if near else ""))
    if seen.snapshots or seen.uncommitted:
        table = output.table(seen.url, "step>", "state", "size>", "captured", "names", "run", "directory")
        rows = [(found.step, found.location, found, state_of(found)) for found in seen.snapshots] + [
            (step, name, None, ("no valid manifest", "yellow")) for name, step in seen.uncommitted
        ]
        for step, location, found, (state, style) in sorted(rows, key=lambda row: row[:2]):
            table.add_row(
                str(step),
                output.cell(state, style),
                decimal(found.size_bytes) if found else "",
                when(found.captured_ns) if found else "",
                output.cell(", ".join(found.names) if found else ""),
                _run(seen, found.run_id) if found else "",
                output.cell(location),
            )
        output.show(table)
    if seen.frozen:
        images = output.table("immutable tensors, stored once", "size>", "snapshots>", "directory")
        for image, manifest in seen.frozen:
            images.add_row(decimal(manifest.size_bytes), str(seen.references(image)), image.location)
        output.show(images)
    for problem in seen.inventory.problems:
        output.line(problem, "yellow")
