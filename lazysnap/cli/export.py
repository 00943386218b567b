"""``lazysnap export``: a snapshot in the format of another tool."""

import argparse
import contextlib
import os
import time

from rich.filesize import decimal

from lazysnap.cli.output import Output
from lazysnap.cli.stores import open_existing, open_place
from lazysnap.errors import ConfigError, LazySnapError, LevelError, SnapshotNotFound
from lazysnap.exports.exporting import ACCELERATE, Exported, Target, write
from lazysnap.exports.folder import place_now
from lazysnap.exports.job import ExportOptions
from lazysnap.exports.target import format_of
from lazysnap.levels.store import SnapshotStore
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import look_again

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


def run(args: argparse.Namespace, output: Output) -> int:
    """Export. Blocks. Raises: SnapshotNotFound, ShardCorrupt, UnsupportedState, ConfigError, LevelError, OSError."""
    target = _target(args, output)
    to = os.path.abspath(args.to)
    # With --wait the level need not exist yet.
    store = (open_place if args.wait else open_existing)(args.url, args.storage_option)
    if args.after is not None:
        os.read(args.after, 1)  # nothing is ever written: returns when all holders of the other end have exited
    _wait(store, args)

    def written(catalogue: Catalogue) -> "tuple[str, Exported] | None":
        plan = catalogue.find(args.wanted, args.run)
        done = None
        try:
            done = write(catalogue, plan, target)
        except (LazySnapError, OSError):
            if not _is_removed(args):
                raise
        if args.release:
            catalogue.store.release(plan.run_id, args.wanted)
        return None if done is None else (catalogue.runs[plan.run_id], done)

    found = None
    try:
        found = look_again(store, written)
    except (LazySnapError, OSError):
        if not _is_removed(args):
            raise
    if found is None or _is_removed(args):
        return output.result(url=store.url, to=to, format=target.format, removed=True)
    run_id, done = found
    for note in done.notes:
        output.say(note, "yellow")
    output.line(
        f"{done.path}: {done.format}, {decimal(done.size_bytes)}, step {done.step} of run {run_id} at {done.url}"
    )
    return output.result(
        url=store.url,
        step=done.step,
        run_id=done.run_id,
        to=done.path,
        format=done.format,
        size_bytes=done.size_bytes,
        notes=done.notes,
    )


def _target(args: argparse.Namespace, output: Output) -> Target:
    """Raises: ConfigError, for arguments that do not fit each other."""
    options = ExportOptions(
        only=args.only,
        config=args.config,
        keep_types=args.keep_types,
        force=args.force,
    )
    kind = format_of(args.to, args.format)
    options.check(kind)
    if kind != ACCELERATE and (args.wait or args.release or args.into is not None):
        raise ConfigError("--wait, --release and --into are for --format accelerate")
    return Target(path=args.to, format=kind, options=options, made=args.into, bar=output.bar)


def _wait(store: SnapshotStore, args: argparse.Namespace) -> None:
    """Wait until the chosen snapshot is complete at the level, at most as long as ``--wait`` says."""
    deadline, pause_s = time.monotonic() + args.wait, _FIRST_PAUSE_S
    # Where the level is gone with the directory, the snapshot will never come.
    while time.monotonic() + pause_s <= deadline and not (_is_removed(args) and not os.path.isdir(store.url)):
        with contextlib.suppress(SnapshotNotFound, LevelError):
            if next(Catalogue(store).meant(args.wanted, args.run), None) is not None:
                return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_removed(args: argparse.Namespace) -> bool:
    """True if the directory that was to be filled is gone: the program removed it."""
    return args.into is not None and place_now(args.to, args.into) is None
