"""``lazysnap ls``: the snapshots of a level, and what is wrong there."""

import argparse

from rich.filesize import decimal

from lazysnap.cli.output import OK, Output, when
from lazysnap.cli.places import open_existing
from lazysnap.cli.survey import Found, Survey, survey


def run(args: argparse.Namespace, output: Output) -> int:
    """List. Blocks: reads every manifest, no shard. Raises: LevelError."""
    seen = survey(open_existing(args.url, args.storage_option))
    uncommitted = [{"location": name, "step": step, "run_id": None} for name, step in seen.uncommitted]
    frozen = [
        {
            "location": image.location,
            "run_id": image.run_id,
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
            "snapshots": sorted(
                [*(_fields(seen, found) for found in seen.snapshots), *({**_EMPTY, **item} for item in uncommitted)],
                key=lambda item: (item["step"], item["location"]),
            ),
            "frozen": frozen,
            "problems": list(seen.inventory.problems),
        }
    )
    _print(seen, output)
    return OK


_EMPTY = {"ranks": 0, "world_size": 0, "size_bytes": 0, "captured_ns": 0, "names": [], "frozen": [], "complete": False}


def _fields(seen: Survey, found: Found) -> dict[str, object]:
    return {
        "location": found.location,
        "step": found.step,
        "run_id": found.run_id,
        "ranks": len(found.shards),
        "world_size": found.world_size,
        "size_bytes": found.size_bytes,
        "captured_ns": max(manifest.meta.captured_ns for _, manifest in found.shards),
        "names": found.names,
        "frozen": found.frozen,
        "complete": found.is_whole and not seen.missing(found),
    }


def state_of(seen: Survey, found: Found) -> tuple[str, str]:
    """In a word, whether a snapshot can be restored from its level alone; and the colour for it."""
    if not found.is_whole:
        return f"{len(found.shards)} of {found.world_size} ranks", "yellow"
    if seen.missing(found):
        return "without its immutable tensors", "yellow"
    return "complete", "green"


def _print(seen: Survey, output: Output) -> None:
    if not seen.snapshots and not seen.uncommitted and not seen.frozen:
        output.line(f"no snapshots in {seen.url}")
    if seen.snapshots or seen.uncommitted:
        table = output.table(seen.url, "step>", "state", "size>", "captured", "names", "run", "directory")
        rows = [(found.step, found.location, found, state_of(seen, found)) for found in seen.snapshots] + [
            (step, name, None, ("no valid manifest", "yellow")) for name, step in seen.uncommitted
        ]
        for step, location, found, (state, style) in sorted(rows, key=lambda row: row[:2]):
            captured = max((manifest.meta.captured_ns for _, manifest in found.shards), default=0) if found else 0
            table.add_row(
                str(step),
                output.cell(state, style),
                decimal(found.size_bytes) if found else "",
                when(captured) if found else "",
                output.cell(", ".join(found.names) if found else ""),
                found.run_id if found else "",
                output.cell(location),
            )
        output.show(table)
    if seen.frozen:
        images = output.table("immutable tensors, stored once", "size>", "snapshots>", "run", "directory")
        for image, manifest in seen.frozen:
            images.add_row(decimal(manifest.size_bytes), str(seen.references(image)), image.run_id, image.location)
        output.show(images)
    for problem in seen.inventory.problems:
        output.line(problem, "yellow")
