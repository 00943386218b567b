"""``lazysnap show``: what one snapshot holds: facts, tensors, small state. Reads manifests and headers, no data."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import OK, Output, safe, when
from lazysnap.cli.places import open_existing
from lazysnap.export.weights import TAG
from lazysnap.resolver import RestartPlan
from lazysnap.shard.names import id_time_ns
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import OpenSnapshot, open_snapshot

_TEXT = 60
"""Characters that are shown of a value, unless all are asked for."""
_DEPTH = 40
"""What is nested more deeply is shown as one value."""


def run(args: argparse.Namespace, output: Output) -> int:
    """Show. Blocks: reads manifests and the first blocks. Raises: SnapshotNotFound, ShardCorrupt, LevelError."""
    catalogue = Catalogue(open_existing(args.url, args.storage_option))
    plan = catalogue.find(args.wanted, args.run)
    both = args.tensors == args.state
    snapshot = open_snapshot(catalogue, plan, verify=True)
    facts = _facts(catalogue, plan)
    tensors = [row for rank in range(plan.world_size) for row in _tensors(snapshot, rank)]
    state = snapshot.meta(0).state
    shown: dict[str, Any] = {"command": "show", "ok": True, **facts}
    if both or args.tensors:
        shown["tensors"] = tensors
    if both or args.state:
        shown["state"] = state
    output.result(shown)
    if output.as_json:
        return OK
    if both:
        _print_facts(output, facts, catalogue.runs[plan.run_id])
    if both or args.tensors:
        _print_tensors(output, tensors, plan.world_size > 1)
    if both or args.state:
        table = output.table("state" if plan.world_size == 1 else "state of rank 0", "name", "value")
        for pair in _values(state):
            cells = (text if args.full or len(text) <= _TEXT else f"{text[: _TEXT - 1]}…" for text in pair)
            table.add_row(*map(output.cell, cells))
        output.show(table)
    return OK


def _facts(catalogue: Catalogue, plan: RestartPlan) -> dict[str, Any]:
    manifests = catalogue.manifests(plan)
    return {
        "url": catalogue.store.url,
        "step": plan.step,
        "run_id": plan.run_id,
        "run_started_ns": id_time_ns(plan.run_id),
        "world_size": plan.world_size,
        "location": plan.sources[0][0].location,
        "names": sorted({name for offers in plan.sources for name in offers[0].names}),
        "captured_ns": max(manifest.meta.captured_ns for manifest in manifests),
        "created_ns": max(manifest.created_ns for manifest in manifests),
        "size_bytes": sum(manifest.size_bytes for manifest in manifests),
        "frozen": [
            {"digest": image.digest, "location": image.location, "size_bytes": manifest.size_bytes}
            for image, manifest in catalogue.images(plan)
        ],
        "checksum": [manifest.checksums.whole for manifest in manifests],
        "packages": manifests[0].meta.packages,
    }


def _tensors(snapshot: OpenSnapshot, rank: int) -> list[dict[str, Any]]:
    """One row for each tensor and each further name of a tied one."""
    rows = []
    for number, shard in enumerate(snapshot.ranks[rank]):
        for name in [*(spec.name for spec in shard.layout.specs), *shard.meta.aliases]:
            is_tied = name in shard.meta.aliases
            stored = shard.stored(shard.meta.aliases.get(name, name))
            rows.append(
                {
                    "name": name,
                    "dtype": stored.logical or stored.spec.dtype,
                    "shape": list(stored.shape),
                    "bytes": 0 if is_tied else stored.spec.nbytes,
                    "image": "frozen" if number else "shard",
                    "alias_of": stored.name if is_tied else None,
                    "rank": rank,
                }
            )
    return rows


def _values(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Path and value of each leaf of an encoded state, in the encoding: nothing is decoded."""
    is_list = isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)
    if isinstance(value, dict) and value and TAG not in value and depth < _DEPTH:
        pairs = list(value.items())
    elif is_list and depth < _DEPTH:
        pairs = [(str(index), item) for index, item in enumerate(value)]
    else:
        is_tensor = isinstance(value, dict) and value.get(TAG) == "tensor"
        yield path, f"tensor {value.get('v')}" if is_tensor else json.dumps(value, ensure_ascii=False)
        return
    for key, item in pairs:
        yield from _values(item, f"{path}.{key}" if path else key, depth + 1)


def _print_facts(output: Output, facts: dict[str, Any], run_name: str) -> None:
    table = output.table("", "", "")
    table.show_header = False
    ranks = f"{facts['world_size']} rank{'s' * (facts['world_size'] != 1)}"
    rows = [
        ("step", str(facts["step"])),
        ("run", f"{run_name}, started {when(facts['run_started_ns'])}"),
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
