"""``lazysnap show``: what one snapshot holds: facts, tensors, small state. Reads manifests and headers, no data."""

import argparse
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import OK, Output, safe, when
from lazysnap.cli.places import find, open_existing
from lazysnap.cli.state_tree import StateTree
from lazysnap.errors import ShardCorrupt
from lazysnap.export.images import RankImages, SnapshotImages


def run(args: argparse.Namespace, output: Output) -> int:
    """Show. Blocks: reads manifests and the first blocks. Raises: SnapshotNotFound, ShardCorrupt, LevelError."""
    store = open_existing(args.url, args.storage_option)
    plan = find(store.inventory(), args.wanted, args.run)
    both = args.tensors == args.state
    with SnapshotImages(store, plan) as snapshot:
        facts = _facts(store.url, snapshot)
        tensors = [row for rank in snapshot.ranks for row in _tensors(rank)] if both or args.tensors else []
        state = snapshot.ranks[0].state
        shown: dict[str, Any] = {"command": "show", "ok": True, **facts}
        if both or args.tensors:
            shown["tensors"] = tensors
        if both or args.state:
            shown["state"] = state
        output.result(shown)
        if output.as_json:
            return OK
        if both:
            _print_facts(output, facts)
        if both or args.tensors:
            _print_tensors(output, tensors, len(snapshot.ranks) > 1)
        if both or args.state:
            rank = snapshot.ranks[0]
            tree = StateTree(lambda name: output.hide(_reference(rank, name)), full=args.full)
            output.show(tree.draw("state" if len(snapshot.ranks) == 1 else "state of rank 0", state))
    return OK


def _facts(url: str, snapshot: SnapshotImages) -> dict[str, Any]:
    plan, first = snapshot.plan, snapshot.ranks[0]
    files = {rank.images[0].reader.where: rank.images[0].manifest for rank in snapshot.ranks}
    frozen = {image.manifest.checksums.whole: image for rank in snapshot.ranks for image in rank.images[1:]}
    return {
        "url": url,
        "step": plan.step,
        "run_id": plan.run_id,
        "run_started_ns": plan.run_started_ns,
        "world_size": plan.world_size,
        "location": plan.sources[0][0].location,
        "names": sorted({name for offers in plan.sources for name in offers[0].names}),
        "captured_ns": max(rank.meta.captured_ns for rank in snapshot.ranks),
        "created_ns": max(rank.images[0].manifest.created_ns for rank in snapshot.ranks),
        "size_bytes": sum(manifest.size_bytes for manifest in files.values()),
        "frozen": [
            {"digest": digest, "location": plan.frozen[digest][0].location, "size_bytes": image.manifest.size_bytes}
            for digest, image in sorted(frozen.items())
        ],
        "checksum": [manifest.checksums.whole for manifest in files.values()],
        "packages": first.meta.packages,
    }


def _tensors(rank: RankImages) -> list[dict[str, Any]]:
    """One row for each tensor and each further name of a tied one."""
    stored = [spec.name for image in rank.images for spec in image.layout.specs]
    tied = [name for image in rank.images for name in image.manifest.meta.aliases]
    rows = []
    for name in [*stored, *tied]:
        located = rank.find(name)
        is_tied = located.stored != name
        rows.append(
            {
                "name": name,
                "dtype": located.dtype,
                "shape": list(located.shape),
                "bytes": 0 if is_tied else located.spec.nbytes,
                "image": located.image.kind,
                "alias_of": located.stored if is_tied else None,
                "rank": rank.meta.rank,
            }
        )
    return rows


def _reference(rank: RankImages, name: str) -> str:
    try:
        located = rank.find(name)
    except ShardCorrupt:
        return f"tensor {name}: in no image"
    tied = f" = {located.stored}" if located.stored != name else ""
    return f"tensor {located.dtype} {list(located.shape)}{tied}"


def _print_facts(output: Output, facts: dict[str, Any]) -> None:
    table = output.table("", "", "")
    table.show_header = False
    ranks = f"{facts['world_size']} rank{'s' * (facts['world_size'] != 1)}"
    rows = [
        ("step", str(facts["step"])),
        ("run", f"{facts['run_id']}, started {when(facts['run_started_ns'])}"),
        ("at", f"{facts['url']}/{facts['location']}"),
        ("names", ", ".join(facts["names"])),
        ("captured", when(facts["captured_ns"])),
        ("committed", when(facts["created_ns"])),
        ("size", f"{decimal(facts['size_bytes'])} in {ranks}"),
        *(("frozen", f"{decimal(image['size_bytes'])} in {image['location']}") for image in facts["frozen"]),
        ("checksum", ", ".join(facts["checksum"])),
        ("packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items())),
    ]
    for name, value in rows:
        if value:
            table.add_row(output.cell(name, "bold"), output.cell(value))
    output.show(table)


def _print_tensors(output: Output, tensors: list[dict[str, Any]], with_rank: bool) -> None:
    columns = ["name", "dtype", "shape", "bytes>", "in"] + ["rank>"] * with_rank
    table = output.table(f"{len(tensors)} tensors", *columns)
    for row in tensors:
        where = f"= {row['alias_of']}" if row["alias_of"] else row["image"]
        cells = [row["name"], row["dtype"], str(row["shape"]), decimal(row["bytes"]) if row["bytes"] else "0", where]
        table.add_row(*(output.cell(safe(cell)) for cell in cells), *([str(row["rank"])] * with_rank))
    output.show(table)
