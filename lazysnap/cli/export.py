"""``lazysnap export``: a snapshot as safetensors weights, a checkpoint of Lightning or torch, or a DCP or Accelerate
directory.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable

from rich.filesize import decimal

from lazysnap.cli.output import Output
from lazysnap.cli.stores import open_existing, open_place
from lazysnap.errors import ConfigError, LazySnapError, LevelError, SnapshotNotFound
from lazysnap.exports.folder import in_place_when_whole, place_now
from lazysnap.exports.safetensors import bytes_of, located, write_weights
from lazysnap.exports.target import format_of, replaced_when_whole
from lazysnap.exports.weights import chosen_tensors, registered_names
from lazysnap.levels.redaction import shown
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import RestartPlan
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import OpenSnapshot, look_again, open_snapshot

ACCELERATE = "accelerate"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


def run(args: argparse.Namespace, output: Output) -> int:
    """Export. Blocks. Raises: SnapshotNotFound, ShardCorrupt, UnsupportedState, ConfigError, LevelError, OSError."""
    kind = format_of(args.to, args.format)
    _check(args, kind)
    to = os.path.abspath(args.to)
    # With --wait the level need not exist yet.
    store = (open_place if args.wait else open_existing)(args.url, args.storage_option)
    if args.after is not None:
        os.read(args.after, 1)  # nothing is ever written: returns when all holders of the other end have exited
    _wait(store, args)

    def written(catalogue: Catalogue) -> tuple[Catalogue, RestartPlan, list[str]]:
        plan = catalogue.find(args.wanted, args.run)
        notes: list[str] = []
        try:
            notes = _layout(catalogue, plan, args, to) if kind == ACCELERATE else _file(catalogue, plan, args, output)
        except (LazySnapError, OSError):
            if not _is_removed(args):
                raise
        if args.release:
            catalogue.store.release(plan.run_id, args.wanted)
        return catalogue, plan, notes

    try:
        catalogue, plan, notes = look_again(store, written)
    except (LazySnapError, OSError):
        if not _is_removed(args):
            raise
    if _is_removed(args):
        return output.result(url=store.url, to=to, format=kind, removed=True)
    if args.into is not None:
        to = place_now(to, args.into) or to
    size = sum(os.path.getsize(path) for path in _files(to))
    for note in notes:
        output.say(note, "yellow")
    output.line(f"step {plan.step} of run {catalogue.runs[plan.run_id]}: {to}, {kind}, {decimal(size)}")
    return output.result(
        url=store.url, step=plan.step, run_id=plan.run_id, to=to, format=kind, size_bytes=size, notes=notes
    )


def _check(args: argparse.Namespace, kind: str) -> None:
    if args.only is not None and kind != "safetensors":
        raise ConfigError("--only chooses tensors for a .safetensors file")
    if args.keep_types and kind != "ckpt":
        raise ConfigError("--keep-types is for .ckpt files")
    if kind != ACCELERATE:
        if args.wait or args.release or args.into is not None:
            raise ConfigError("--wait, --release and --into are for --format accelerate")
        return
    to = os.path.abspath(args.to)
    if os.path.lexists(to) and not args.force and not (os.path.isdir(to) and not os.listdir(to)):
        raise ConfigError(f"{to} is there already: add --force to replace the checkpoint in it, or choose another name")


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


def _layout(catalogue: Catalogue, plan: RestartPlan, args: argparse.Namespace, to: str) -> list[str]:
    """Write the layout of Accelerate, from any number of ranks."""
    from lazysnap.exports.accelerate import OF_EVERY_RANK, write_stock  # torch: seconds to import
    from lazysnap.snapshots.tensors import SnapshotTensors, parts_of

    facts = {"layout": ACCELERATE, "step": plan.step, "run_id": plan.run_id}
    with in_place_when_whole(to, facts, made=args.into) as temp, contextlib.ExitStack() as stack:
        snapshot = stack.enter_context(contextlib.closing(open_snapshot(catalogue, plan)))
        states = [
            SnapshotTensors(snapshot, rank).state(parts_of(OF_EVERY_RANK if rank else None))
            for rank in range(plan.world_size)
        ]
        write_stock(states, temp)
    return []


def _file(catalogue: Catalogue, plan: RestartPlan, args: argparse.Namespace, output: Output) -> list[str]:
    """Write one of the other formats, from one rank; returns notes for the user."""
    with replaced_when_whole(os.path.abspath(args.to), force=args.force) as temp, contextlib.ExitStack() as stack:
        if plan.world_size != 1:
            raise ConfigError(
                f"step {plan.step} has {plan.world_size} ranks, and this format is written of one only; the weights of "
                f"all ranks, whole: lazysnap.load_weights({shown(catalogue.store.url)!r}, {plan.step})"
            )
        snapshot = stack.enter_context(contextlib.closing(open_snapshot(catalogue, plan, verify=True)))
        if format_of(args.to, args.format) == "safetensors":
            return _weights(snapshot, args.only, temp, output)
        with output.bar("reading", sum(shard.layout.size_bytes for shard in snapshot.ranks[0])) as advance:
            return _state(snapshot, args, temp, advance)


def _weights(snapshot: OpenSnapshot, only: str | None, path: str, output: Output) -> list[str]:
    tensors = located(snapshot, chosen_tensors(snapshot.meta(0).state, only))
    with snapshot.leased(), output.bar("exporting", bytes_of(tensors)) as advance:
        write_weights(tensors, path, advance)
    tied = len(tensors) - len({stored.key for stored in tensors.values()})
    some = f"{tied} tied tensor{'s are' if tied > 1 else ' is'}"
    return [f"{some} stored once: load with safetensors.torch.load_model"] if tied else []


def _state(snapshot: OpenSnapshot, args: argparse.Namespace, path: str, advance: Callable[[int], None]) -> list[str]:
    from lazysnap.exports.checkpoint import write_checkpoint, write_distributed  # torch: seconds to import
    from lazysnap.snapshots.tensors import SnapshotTensors, parts_of

    state = SnapshotTensors(snapshot, rank=0).state(parts_of(None), advance)
    names = registered_names(snapshot.meta(0).state)
    notes = [f"values of the registered type {name!r} became what its encoder made" for name in sorted(names)]
    if format_of(args.to, args.format) == "ckpt":
        return notes + write_checkpoint(state, path, keep_types=args.keep_types)
    write_distributed(state, path)
    return notes


def _files(path: str) -> list[str]:
    return [os.path.join(at, name) for at, _, names in os.walk(path) for name in names] or [path]
