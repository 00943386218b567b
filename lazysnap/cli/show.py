"""``lazysnap show``: facts, tensors and small state of one snapshot. Reads manifests and headers, no tensors."""

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.output import Output, count_of, fields_of, when
from lazysnap.cli.stores import open_existing
from lazysnap.resolver import RestartPlan
from lazysnap.shard.manifest import TAG
from lazysnap.shard.names import id_time_ns
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import OpenSnapshot, look_again, open_snapshot

_MOST_CHARACTERS = 60
"""Characters of a value that are shown without ``--full``."""
_MOST_LEVELS = 40
"""Levels of nesting that are shown one by one. A deeper value is one line."""


def run(args: argparse.Namespace, output: Output) -> int:
    """Show. Blocks: reads manifests and the first blocks. Raises: SnapshotNotFound, FormatError, LevelError."""
    store = open_existing(args.url, args.storage_option)

    def opened(catalogue: Catalogue) -> tuple[Catalogue, OpenSnapshot]:
        return catalogue, open_snapshot(catalogue, catalogue.find(args.wanted, args.run), verify=True)

    catalogue, snapshot = look_again(store, opened)
    with contextlib.closing(snapshot):
        return _show(catalogue, snapshot, args, output)


def _show(catalogue: Catalogue, snapshot: OpenSnapshot, args: argparse.Namespace, output: Output) -> int:
    plan = snapshot.plan
    facts = _facts(catalogue, plan)
    shown: dict[str, Any] = {}
    everything = args.tensors == args.state
    if everything:
        _print_facts(output, facts, catalogue.runs[plan.run_id])
    if everything or args.tensors:
        shown["tensors"] = [row for rank in range(plan.world_size) for row in _tensors(snapshot, rank)]
        _print_tensors(output, shown["tensors"], plan.world_size > 1)
    if everything or args.state:
        shown["state"] = snapshot.meta(0).state
        title = "state" if plan.world_size == 1 else "state of rank 0"
        _print_state(output, title, shown["state"], None if args.full else _MOST_CHARACTERS)
    return output.result(**facts, **shown)


def _facts(catalogue: Catalogue, plan: RestartPlan) -> dict[str, Any]:
    found = catalogue.found(plan)
    manifests = [manifest for _, manifest in found.files]
    return {
        "url": catalogue.store.url,
        **fields_of(found),
        "run_started_ns": id_time_ns(plan.run_id),
        "world_size": plan.world_size,
        "captured_ns": found.captured_ns,
        "created_ns": max(manifest.created_ns for manifest in manifests),
        "checksum": [manifest.checksums.whole for manifest in manifests],
        "packages": manifests[0].meta.packages,
    }


def _tensors(snapshot: OpenSnapshot, rank: int) -> list[dict[str, Any]]:
    """Return one row for each tensor and each further name of a tied one."""
    rows = []
    shard = snapshot.shards[rank]
    for name in shard.names:
        is_tied = name in shard.meta.aliases
        stored = shard.stored(shard.meta.aliases.get(name, name))
        rows.append(
            {
                "name": name,
                "dtype": stored.logical or stored.spec.dtype,
                "shape": list(stored.shape),
                "bytes": 0 if is_tied else stored.spec.nbytes,
                "alias_of": stored.name if is_tied else None,
                "rank": rank,
            }
        )
    return rows


def _values(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield path and value of each leaf of an encoded state. Nothing is decoded."""
    is_list = isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)
    if isinstance(value, dict) and value and TAG not in value and depth < _MOST_LEVELS:
        pairs = list(value.items())
    elif is_list and depth < _MOST_LEVELS:
        pairs = [(str(index), item) for index, item in enumerate(value)]
    else:
        is_tensor = isinstance(value, dict) and value.get(TAG) == "tensor"
        yield path, f"tensor {value.get('v')}" if is_tensor else json.dumps(value, ensure_ascii=False)
        return
    for key, item in pairs:
        yield from _values(item, f"{path}.{key}" if path else key, depth + 1)


def _print_facts(output: Output, facts: dict[str, Any], run_name: str) -> None:
    rows = [
        ("step", str(facts["step"])),
        ("run", f"{run_name}, started {when(facts['run_started_ns'])}"),
        ("at", f"{facts['url']}/{facts['location']}"),
        ("names", ", ".join(facts["names"])),
        ("captured", when(facts["captured_ns"])),
        ("committed", when(facts["created_ns"])),
        ("size", f"{decimal(facts['size_bytes'])} in {count_of(facts['world_size'], 'rank')}"),
        ("checksum", ", ".join(facts["checksum"])),
        ("packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items())),
    ]
    table = output.table("", "", "", rows=[(output.cell(name, "bold"), value) for name, value in rows if value])
    table.show_header = False
    output.show(table)


def _print_tensors(output: Output, tensors: list[dict[str, Any]], with_rank: bool) -> None:
    columns = ["name", "dtype", "shape", "bytes>", "tied to"] + ["rank>"] * with_rank
    rows = []
    for row in tensors:
        size = decimal(row["bytes"]) if row["bytes"] else "0"
        rows.append([row["name"], row["dtype"], row["shape"], size, row["alias_of"] or "", row["rank"]][: len(columns)])
    output.show(output.table(f"{len(tensors)} tensors", *columns, rows=rows))


def _print_state(output: Output, title: str, state: Any, most: int | None) -> None:
    def short(text: str) -> str:
        return text if most is None or len(text) <= most else f"{text[: most - 1]}…"

    output.show(output.table(title, "name", "value", rows=[map(short, pair) for pair in _values(state)]))
