"""``lazysnap export``: a snapshot as safetensors weights, a checkpoint of Lightning or torch, or a DCP directory."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.filesize import decimal

from lazysnap.cli.interrupt import Interrupt, noting_interrupts
from lazysnap.cli.output import OK, Output
from lazysnap.cli.places import find, open_existing
from lazysnap.errors import ConfigError
from lazysnap.export.images import RankImages, SnapshotImages
from lazysnap.export.safetensors import bytes_to_read, write_weights
from lazysnap.export.target import format_of, replaced_when_whole
from lazysnap.export.weights import chosen_tensors


def run(args: argparse.Namespace, output: Output) -> int:
    """Export. Blocks. Raises: SnapshotNotFound, ShardCorrupt, UnsupportedState, ConfigError, LevelError, OSError."""
    kind = format_of(args.to, args.format)
    if args.only is not None and kind != "safetensors":
        raise ConfigError("--only chooses tensors for a .safetensors file")
    if args.keep_types and kind != "ckpt":
        raise ConfigError("--keep-types is for .ckpt files")
    store = open_existing(args.url, args.storage_option)
    plan = find(store.inventory(), args.wanted, args.run)
    to = os.path.abspath(args.to)
    with (
        noting_interrupts() as interrupt,
        replaced_when_whole(to, force=args.force) as temp,
        SnapshotImages(store, plan) as snapshot,
    ):
        work = _Work(snapshot.only, args, output, interrupt)
        notes = work.weights(temp) if kind == "safetensors" else work.state(temp, kind)
        interrupt.check()
    size = _size(to)
    output.result(
        {
            "command": "export",
            "ok": True,
            "url": store.url,
            "step": plan.step,
            "run_id": plan.run_id,
            "to": to,
            "format": kind,
            "size_bytes": size,
            "notes": notes,
        }
    )
    for note in notes:
        output.say(note, "yellow")
    output.line(f"step {plan.step} of run {plan.run_id}: {to}, {kind}, {decimal(size)}")
    return OK


@dataclass(frozen=True)
class _Work:
    """Writes one of the formats; each method returns what the user should know."""

    rank: RankImages
    args: argparse.Namespace
    output: Output
    interrupt: Interrupt

    def weights(self, path: str) -> list[str]:
        """A safetensors file."""
        names = chosen_tensors(self.rank.state, self.args.only)
        with self._bar("exporting", bytes_to_read(self.rank, names)) as beat:
            write_weights(self.rank, names, path, beat)
        tied = len(names) - len({self.rank.find(name).key for name in names.values()})
        some = f"{tied} tied tensor{'s are' if tied > 1 else ' is'}"
        return [f"{some} stored once: load with safetensors.torch.load_model"] if tied else []

    def state(self, path: str, kind: str) -> list[str]:
        """The whole state, in one of torch's formats."""
        from lazysnap.export.loading import load_state, registered_names  # torch: seconds to import

        with self._bar("reading", sum(image.manifest.size_bytes for image in self.rank.images)) as beat:
            state = load_state(self.rank, beat)
        names = registered_names(self.rank.state)
        notes = [f"values of the registered type {name!r} became what its encoder made" for name in sorted(names)]
        if kind == "ckpt":
            from lazysnap.export.checkpoint import write_checkpoint

            return notes + write_checkpoint(state, path, keep_types=self.args.keep_types)
        from lazysnap.export.distributed import write_distributed

        write_distributed(state, path)
        return notes

    @contextlib.contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        with self.output.bar(what, total) as advance:

            def beat(count: int) -> None:
                self.interrupt.check()
                advance(count)

            yield beat


def _size(path: str) -> int:
    if os.path.isdir(path):
        return sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path))
    return os.path.getsize(path)
