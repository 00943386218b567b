"""What can be asked, and who answers: the modules of this package, each imported when its command runs."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import lazysnap
from lazysnap.cli.output import BAD, FAILED, INTERRUPTED, Output
from lazysnap.cli.places import parse_option, secrets
from lazysnap.errors import FormatError, LazySnapError

_URL = "path or fsspec URL of a level, e.g. runs/lazysnap or s3://bucket/run"
_WANTED = "a step, a name given by keep, or 'latest'"


class _Parser(argparse.ArgumentParser):
    """Refuses arguments in JSON too, if the result was to be JSON."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        if self.as_json:
            words = self.prog.split()
            said = {"command": words[-1] if len(words) > 1 else None, "ok": False, "error": f"usage: {message}"}
            sys.stdout.write(json.dumps(said) + "\n")
        super().error(message)


def parser(*, as_json: bool = False) -> argparse.ArgumentParser:
    """The arguments of all commands; ``as_json``: what is wrong with them is said in JSON, too."""
    kind: type[argparse.ArgumentParser] = type("_Parser", (_Parser,), {"as_json": as_json})
    root = kind(
        prog="lazysnap",
        description="Look at snapshots of training runs, check, copy, export and delete them.",
        epilog="Exit codes: 0 good, 1 something bad was found, 2 could not look or bad usage, 130 interrupted.",
    )
    root.add_argument("--version", action="version", version=f"lazysnap {lazysnap.__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="command")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object on stdout; messages on stderr")
    level = argparse.ArgumentParser(add_help=False, parents=[common])
    level.add_argument("url", help=_URL)
    _add_option(level, "--storage-option", "an option of the fsspec file system, next to fsspec's own configuration")

    commands.add_parser("ls", parents=[level], help="list the snapshots of a directory or URL")

    verify = commands.add_parser("verify", parents=[level], help="read every byte and check every checksum")
    verify.add_argument("--step", type=int, action="append", help="only this step (may be repeated)")

    show = commands.add_parser("show", parents=[level], help="what a snapshot holds, without reading its data")
    show.add_argument("wanted", metavar="STEP|NAME|latest", help=_WANTED)
    show.add_argument("--run", metavar="ID", help="of this run (its first digits), if several have that step")
    show.add_argument("--tensors", action="store_true", help="only the table of tensors")
    show.add_argument("--state", action="store_true", help="only the small state")
    show.add_argument("--full", action="store_true", help="shorten nothing")

    prune = commands.add_parser("prune", parents=[level], help="delete old snapshots, and what dead writers left")
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N complete snapshots of each run")
    prune.add_argument("--keep-every", type=int, metavar="N", help="and those whose step is a multiple of N")
    prune.add_argument("--run", metavar="ID", help="only of this run (its first digits)")
    prune.add_argument("--name", help="take this name from the snapshots that have it, which ends their protection")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    prune.add_argument("--yes", action="store_true", help="do not ask")

    copy = commands.add_parser("copy", parents=[common], help="copy snapshots to another level, verified")
    copy.add_argument("url", help=_URL)
    copy.add_argument("to", metavar="URL", help="where to")
    which = copy.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every complete snapshot, the newest first (default)")
    which.add_argument("--latest", action="store_true", help="only the newest complete one")
    which.add_argument("--step", metavar="STEP|NAME", action="append", help="only this one (may be repeated)")
    copy.add_argument("--run", metavar="ID", help="only of this run (its first digits)")
    _add_option(copy, "--storage-option", "an option of the fsspec file systems on both sides")
    _add_option(copy, "--from-option", "as --storage-option, only where is read")
    _add_option(copy, "--to-option", "as --storage-option, only where is written")

    export = commands.add_parser("export", parents=[level], help="write a snapshot in a format of others")
    export.add_argument("wanted", metavar="STEP|NAME|latest", help=_WANTED)
    export.add_argument("--to", required=True, metavar="PATH", help="FILE.safetensors, FILE.ckpt or a directory (DCP)")
    export.add_argument("--format", choices=("safetensors", "ckpt", "dcp"), help="if the name does not tell it")
    export.add_argument("--only", metavar="NAME", help="only what is below NAME in the state, without that prefix")
    export.add_argument("--run", metavar="ID", help="of this run (its first digits), if several have that step")
    export.add_argument("--force", action="store_true", help="replace what is there")
    export.add_argument(
        "--keep-types",
        action="store_true",
        help=".ckpt: keep types that torch.load(weights_only=True) refuses, instead of making them plain",
    )

    keeper = commands.add_parser("keeper", parents=[common], help="keep a keeper for a job, ahead of it (a sidecar)")
    keeper.add_argument("url", nargs="?", help="URL of the job's first level, as in its settings")
    keeper.add_argument("--job-id", help="the job's SnapshotConfig.job_id; default: LAZYSNAP_JOB_ID, else the URL")
    keeper.add_argument("--local-rank", type=int, default=0, help="of several ranks on this node: whose keeper (0)")
    return root


def _add_option(command: argparse.ArgumentParser, name: str, text: str) -> None:
    command.add_argument(name, metavar="KEY=VALUE", type=parse_option, action="append", default=[], help=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 good, 1 something bad was found, 2 could not look, 130 interrupted.

    Blocks. Raises: SystemExit, for arguments that argparse refuses (code 2), ``--help`` and ``--version``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser(as_json="--json" in arguments).parse_args(arguments)
    options = [pair for name in ("storage_option", "from_option", "to_option") for pair in getattr(args, name, ())]
    urls = [url for url in (getattr(args, "url", None), getattr(args, "to", None)) if url]
    output = Output(as_json=args.json, secrets=secrets(urls, options))
    try:
        code: int = import_module(f"lazysnap.cli.{args.command}").run(args, output)
        return code
    except KeyboardInterrupt:
        output.error(args.command, KeyboardInterrupt("stopped; nothing half is visible"))
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the result has enough; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except FormatError as error:
        output.error(args.command, error)
        return BAD
    except (LazySnapError, OSError) as error:
        output.error(args.command, error)
        return FAILED
