"""``lazysnap export``: a snapshot in the format of another tool."""

import argparse

from rich.filesize import decimal

from lazysnap.cli.output import Output
from lazysnap.cli.stores import open_existing
from lazysnap.exports.exporting import Exported, write
from lazysnap.exports.job import Job
from lazysnap.exports.named import named_in
from lazysnap.exports.target import format_of
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import look_again


def run(args: argparse.Namespace, output: Output) -> int:
    """Export. Blocks. Raises: SnapshotNotFound, FormatError, StateError, ConfigError, LevelError, OSError."""
    job = Job(
        path=args.to,
        format=format_of(args.to, args.format),
        only=args.only,
        config=args.config,
        keep_types=args.keep_types,
        force=args.force,
        bar=output.bar,
    )
    job.check()

    named = named_in(args.to)

    def written(catalogue: Catalogue) -> tuple[str, Exported]:
        plan = catalogue.find(args.wanted, args.run)
        return catalogue.runs[plan.run_id], write(catalogue, plan, job, named)

    run_id, done = look_again(open_existing(args.url, args.storage_option), written)
    for note in done.notes:
        output.say(note, "yellow")
    output.line(
        f"{done.path}: {done.format}, {decimal(done.size_bytes)}, step {done.step} of run {run_id} at {done.url}"
    )
    return output.result(
        url=done.url,
        step=done.step,
        run_id=done.run_id,
        to=done.path,
        format=done.format,
        size_bytes=done.size_bytes,
        notes=done.notes,
    )
