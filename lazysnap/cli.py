"""The command line: ``lazysnap ls``, ``lazysnap verify``, ``lazysnap keeper``."""

import argparse
import json
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

import lazysnap
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels.store import SnapshotStore, open_store
from lazysnap.resolver import Entry
from lazysnap.shard.checksum import block_ranges
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import Manifest, parse_directory_name

OK, BAD, FAILED = 0, 1, 2


@dataclass(frozen=True)
class Listed:
    """One snapshot at a level, or a directory that looks like one."""

    location: str
    step: int
    run_id: str | None = None
    """``None``, if no manifest there can be read: a snapshot that was never committed, or a damaged one."""
    ranks: int = 0
    world_size: int = 0
    size_bytes: int = 0
    captured_ns: int = 0

    @property
    def complete(self) -> bool:
        """Every rank's manifest and shard are there."""
        return 0 < self.ranks == self.world_size


def read_if_there(store: SnapshotStore, entry: Entry) -> Manifest | None:
    """The manifest, or ``None`` if a running job's retention deleted it since the inventory was made."""
    try:
        return store.read_manifest(entry)
    except FileNotFoundError:
        return None


def survey(store: SnapshotStore) -> tuple[list[Listed], tuple[str, ...]]:
    """All snapshots at a level, oldest step first, and what was found wrong there."""
    inventory = store.inventory()
    places: dict[tuple[str, str, int], list[Entry]] = defaultdict(list)
    for entry in inventory.entries:
        places[entry.location, entry.run_id, entry.world_size].append(entry)
    listed = []
    for (location, run_id, world_size), entries in places.items():
        manifests = [manifest for entry in entries if (manifest := read_if_there(store, entry)) is not None]
        if not manifests:
            continue
        listed.append(
            Listed(
                location,
                entries[0].step,
                run_id,
                len(manifests),
                world_size,
                sum(manifest.size_bytes for manifest in manifests),
                max(manifest.meta.captured_ns for manifest in manifests),
            )
        )
    known = {entry.location for entry in inventory.entries}
    for name in store.storage.list():
        step = parse_directory_name(name)
        if step is not None and name not in known:
            listed.append(Listed(name, step))
    return sorted(listed, key=lambda item: (item.step, item.location)), inventory.problems


def list_snapshots(url: str, *, as_json: bool) -> int:
    """``lazysnap ls``: a table, or one JSON object."""
    listed, problems = survey(open_store(url))
    if as_json:
        snapshots = [{**vars(item), "complete": item.complete} for item in listed]
        sys.stdout.write(json.dumps({"url": url, "snapshots": snapshots, "problems": problems}) + "\n")
        return OK
    console = Console()
    table = Table("step", "state", "size", "captured", "run", "directory", title=url, title_justify="left")
    for item in listed:
        if item.run_id is None:
            table.add_row(str(item.step), "[yellow]no valid manifest", "", "", "", item.location)
            continue
        state = "[green]complete" if item.complete else f"[yellow]{item.ranks} of {item.world_size} ranks"
        captured = datetime.fromtimestamp(item.captured_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        table.add_row(str(item.step), state, decimal(item.size_bytes), captured, item.run_id, item.location)
    console.print(table if listed else f"no snapshots in {url}")
    for problem in problems:
        console.print(f"[yellow]{escape(problem)}", highlight=False, soft_wrap=True)
    return OK


def check_shard(store: SnapshotStore, entry: Entry, manifest: Manifest) -> Iterator[int]:
    """Read one shard block by block and compare; yields the bytes done.

    Raises: ShardCorrupt, FormatError, LevelError, FileNotFoundError.
    """
    path = f"{entry.location}/{manifest.file}"
    checksums = manifest.checksums
    buffer = memoryview(bytearray(min(checksums.block_bytes, checksums.size_bytes)))
    for index, (offset, length) in enumerate(block_ranges(checksums.size_bytes, checksums.block_bytes)):
        store.storage.read_into(path, offset, buffer[:length])
        checksums.verify_block(index, buffer[:length], f"{store.url}/{path}")
        yield length
    head = memoryview(bytearray(manifest.header_bytes))
    store.storage.read_into(path, 0, head)
    Layout.parse(head, manifest.size_bytes)


def verify(url: str) -> int:
    """``lazysnap verify``: read every byte of every shard at a level. Exit code 1 if anything is bad."""
    store = open_store(url)
    inventory = store.inventory()
    console = Console()
    bad = list(inventory.problems)
    found = [(entry, read_if_there(store, entry)) for entry in inventory.entries]
    manifests = [(entry, manifest) for entry, manifest in found if manifest is not None]
    good = 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for entry, manifest in sorted(manifests, key=lambda pair: (pair[0].step, pair[0].rank)):
            task = progress.add_task(f"{entry.location}/{manifest.file}", total=manifest.size_bytes)
            try:
                for done in check_shard(store, entry, manifest):
                    progress.advance(task, done)
                good += 1
            except FormatError as error:
                bad.append(str(error))
            except FileNotFoundError as error:
                if read_if_there(store, entry) is not None:
                    bad.append(f"{store.url}/{entry.location}: a manifest without its shard: {error}")
            progress.remove_task(task)
    for problem in bad:
        console.print(f"[red]bad:[/] {escape(problem)}", highlight=False, soft_wrap=True)
    if not good and not bad:
        console.print(f"no snapshots in {url}: nothing to verify", soft_wrap=True)
        return BAD
    console.print(f"{good} shard{'s' * (good != 1)} good, {len(bad)} bad", highlight=False)
    return BAD if bad else OK


def run_keepers(identity: JobIdentity) -> int:
    """``lazysnap keeper``: see to it that this job has a keeper, one after the other, until SIGTERM or Ctrl-C.

    Blocks. A keeper ends with its job, or when no trainer comes for a while; then the next one is started.
    """
    stop = threading.Event()
    keeper: list[subprocess.Popen[bytes]] = []

    def end(*_: Any) -> None:
        stop.set()
        for process in keeper:
            process.terminate()  # it persists its newest snapshot, then leaves

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, end)
    Console().print(f"keeping snapshots of job {escape(identity.job_id)}", soft_wrap=True)
    address = identity.address.encode().hex()
    while not stop.is_set():
        keeper[:] = [subprocess.Popen([sys.executable, "-m", "lazysnap.keeper", "--foreground", "--address", address])]
        if keeper[0].wait() != OK:
            stop.wait(1.0)  # a trainer was faster and has started one of its own
    return OK


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    root = argparse.ArgumentParser(prog="lazysnap", description="Look at snapshots of training runs.")
    root.add_argument("--version", action="version", version=f"lazysnap {lazysnap.__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="command")
    ls = commands.add_parser("ls", help="list the snapshots of a directory or URL")
    ls.add_argument("url", help="path or fsspec URL of a level, e.g. runs/lazysnap or s3://bucket/run")
    ls.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    check = commands.add_parser("verify", help="read every byte and check every checksum; exit code 1 if one is bad")
    check.add_argument("url", help="path or fsspec URL of a level")
    keeper = commands.add_parser("keeper", help="keep a keeper for a job, ahead of it, until SIGTERM (a sidecar)")
    keeper.add_argument("url", nargs="?", help="URL of the job's first level, as in its settings")
    keeper.add_argument("--job-id", help="the job's SnapshotConfig.job_id; default: LAZYSNAP_JOB_ID, else the URL")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 good, 1 something bad was found, 2 could not look."""
    args = parser().parse_args(arguments)
    try:
        if args.command == "ls":
            return list_snapshots(args.url, as_json=args.json)
        if args.command == "keeper":
            levels = (PersistentLevel(args.url),) if args.url else ()
            return run_keepers(JobIdentity.from_config(SnapshotConfig(levels=levels, job_id=args.job_id)))
        return verify(args.url)
    except LazySnapError as error:
        Console(stderr=True).print(
            f"[red]{type(error).__name__}:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
