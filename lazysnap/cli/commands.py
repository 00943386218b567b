"""The arguments of every command, and ``main``, which runs one of them."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import lazysnap
from lazysnap.cli.advise import add_arguments as add_advise
from lazysnap.cli.chaos import add_arguments as add_chaos
from lazysnap.cli.demo import add_arguments as add_demo
from lazysnap.cli.doctor import add_arguments as add_doctor
from lazysnap.cli.output import BAD, FAILED, INTERRUPTED, Output
from lazysnap.cli.stores import parse_option, redaction
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.exports.target import FORMATS

logger = logging.getLogger(__name__)

_URL: dict[str, Any] = {"help": "path or fsspec URL of a level, e.g. runs/lazysnap or s3://bucket/run"}
_WANTED: dict[str, Any] = {"metavar": "STEP|NAME|latest", "help": "a step, a name given by keep, or 'latest'"}
_ONLY_RUN: dict[str, Any] = {"metavar": "ID", "help": "only the run with these first digits, see `lazysnap ls`"}
_OF_RUN: dict[str, Any] = {"metavar": "ID", "help": "the run with these first digits; default: the newest that fits"}
_OPTION: dict[str, Any] = {"metavar": "KEY=VALUE", "type": parse_option, "action": "append", "default": []}


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
    """Return the parser of all commands. ``as_json``: usage errors are printed as JSON, too."""
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
    options = argparse.ArgumentParser(add_help=False, parents=[common])
    options.add_argument("--storage-option", help="an option of the fsspec file systems", **_OPTION)
    level = argparse.ArgumentParser(add_help=False, parents=[options])
    level.add_argument("url", **_URL)
    any_level = argparse.ArgumentParser(add_help=False, parents=[options])
    any_level.add_argument("url", nargs="?", **_URL)
    runs = argparse.ArgumentParser(add_help=False, parents=[options])
    runs.add_argument("urls", nargs="+", metavar="URL", help="the first level of the job; of several nodes, of each")
    runs.add_argument("--run", metavar="ID", help="the run with these first digits; default: the newest")

    listing = commands.add_parser("ls", parents=[level], help="list the snapshots of a directory or URL")
    listing.add_argument("--run", **_ONLY_RUN)
    verify = commands.add_parser("verify", parents=[level], help="read every byte and check every checksum")
    verify.add_argument("--step", type=int, action="append", help="only this step (may be repeated)")
    verify.add_argument("--run", **_ONLY_RUN)
    show = commands.add_parser("show", parents=[level], help="what a snapshot holds, without reading its data")
    show.add_argument("wanted", **_WANTED)
    show.add_argument("--run", **_OF_RUN)
    show.add_argument("--tensors", action="store_true", help="only the table of tensors")
    show.add_argument("--state", action="store_true", help="only the small state")
    show.add_argument("--full", action="store_true", help="shorten nothing")
    _add_prune(commands.add_parser("prune", parents=[level], help="delete old snapshots, and what dead writers left"))
    _add_copy(commands.add_parser("copy", parents=[options], help="copy snapshots to another level, verified"))
    _add_export(commands.add_parser("export", parents=[level], help="write a snapshot in the format of another tool"))
    _add_keeper(commands.add_parser("keeper", parents=[common], help="run a keeper for a job, ahead of it (a sidecar)"))
    _add_stop(commands.add_parser("stop", parents=[common], help="end keepers that a training of this node left"))
    _add_status(commands.add_parser("status", parents=[common], help="the jobs of this node, what would survive now"))
    metrics = commands.add_parser("metrics", parents=[common], help="what status shows, as figures for Prometheus")
    _add_metrics(metrics)
    report = commands.add_parser("report", parents=[runs], help="goodput of a run, the cost of each interruption")
    report.add_argument("--html", metavar="FILE", help="write a page with pictures, too")
    timeline = commands.add_parser("timeline", parents=[runs], help="a run as a trace for Perfetto")
    timeline.add_argument("--to", required=True, metavar="FILE", help="the file of the trace, e.g. trace.json")
    add_demo(commands.add_parser("demo", parents=[common], help="kill a real training, resume it, compare bit for bit"))
    add_chaos(commands.add_parser("chaos", parents=[common], help="run your own training under faults, and judge it"))
    add_doctor(commands.add_parser("doctor", parents=[any_level], help="check this node and a level before a training"))
    _add_run(commands.add_parser("run", parents=[common], help="start a training again after a crash, warm"))
    worker = commands.add_parser("worker", parents=[common], help="a warm start inside a launcher such as torchrun")
    worker.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    add_advise(commands.add_parser("advise", parents=[any_level], help="how often to capture and store, what it costs"))
    return root


def _add_prune(prune: argparse.ArgumentParser) -> None:
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N complete snapshots of each run")
    prune.add_argument("--keep-every", type=int, metavar="N", help="and those whose step is a multiple of N")
    prune.add_argument("--run", **_ONLY_RUN)
    prune.add_argument("--name", help="take this name from the snapshots that have it, which ends their protection")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    prune.add_argument("--yes", action="store_true", help="do not ask")


def _add_copy(copy: argparse.ArgumentParser) -> None:
    copy.add_argument("url", **_URL)
    copy.add_argument("to", metavar="URL", help="the level to copy to")
    which = copy.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every complete snapshot, the newest first (default)")
    which.add_argument("--latest", action="store_true", help="only the newest complete one")
    which.add_argument("--step", metavar="STEP|NAME", action="append", help="only this one (may be repeated)")
    copy.add_argument("--run", **_ONLY_RUN)
    copy.add_argument("--from-option", help="as --storage-option, only for reading", **_OPTION)
    copy.add_argument("--to-option", help="as --storage-option, only for writing", **_OPTION)


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("wanted", **_WANTED)
    export.add_argument("--to", required=True, metavar="PATH", help="FILE.safetensors, FILE.ckpt or a directory")
    export.add_argument("--format", choices=FORMATS, help="if the name does not tell it")
    export.add_argument("--config", metavar="DIR", help="huggingface: copy config and tokenizer files from there")
    export.add_argument("--only", metavar="NAME", help="only what is below NAME in the state, without that prefix")
    export.add_argument("--run", **_OF_RUN)
    export.add_argument("--force", action="store_true", help="replace an earlier export, or an empty directory")
    export.add_argument("--keep-types", action="store_true", help=".ckpt: also types that weights_only=True refuses")


def _add_keeper(keeper: argparse.ArgumentParser) -> None:
    keeper.add_argument("url", nargs="?", help="URL of the job's first level, as in its settings")
    keeper.add_argument("--job-id", help="the job's SnapshotConfig.job_id; default: LAZYSNAP_JOB_ID, else the URL")
    keeper.add_argument("--local-rank", type=int, default=0, help="if each rank runs this: only rank 0 starts a keeper")


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("--max-restarts", type=int, default=10, metavar="N", help="restarts in all (10)")
    run.add_argument(
        "--same-exit-within",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="no restart after two equal exits within that time without a new step (30)",
    )
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def _add_stop(stop: argparse.ArgumentParser) -> None:
    stop.add_argument("job", metavar="JOB", help="the job's SnapshotConfig.job_id, or the URL of its first level")
    stop.add_argument("--force", action="store_true", help="also a keeper whose newest capture cannot be stored")
    stop.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait at most so long (60)")


def _add_status(status: argparse.ArgumentParser) -> None:
    status.add_argument("job", nargs="?", metavar="JOB", help="only this job_id, or URL of a first level")
    status.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=1.0,
        metavar="SECONDS",
        help="show it again every so many seconds (1), until Ctrl-C",
    )


def _add_metrics(metrics: argparse.ArgumentParser) -> None:
    metrics.add_argument("job", nargs="?", metavar="JOB", help="only this job_id, or URL of a first level")
    metrics.add_argument("--to", metavar="FILE.prom", help="replace this file, for node_exporter; default: stdout")
    metrics.add_argument("--every", type=float, metavar="SECONDS", help="again every so many seconds, until Ctrl-C")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit code: 0 good, 1 something bad was found, 2 could not look, 130 interrupted.

    Blocks. Raises: SystemExit, for arguments that argparse refuses (code 2), ``--help`` and ``--version``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser(as_json="--json" in arguments).parse_args(arguments)
    options = [pair for name in ("storage_option", "from_option", "to_option") for pair in getattr(args, name, ())]
    named = (getattr(args, "url", None), getattr(args, "to", None), *getattr(args, "urls", ()))
    urls = [url for url in named if url]
    output = Output(args.command, as_json=args.json, redaction=redaction(urls, options))
    try:
        code: int = import_module(f"lazysnap.cli.{args.command}").run(args, output)
        return code
    except KeyboardInterrupt:
        output.error(KeyboardInterrupt("stopped; nothing half is visible"))
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the result closed the pipe; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except FormatError as error:
        output.error(error)
        return BAD
    except (LazySnapError, OSError) as error:
        output.error(error)
        return FAILED
    except Exception as error:
        logger.debug("%s failed", args.command, exc_info=True)
        where = " and ".join(urls)
        output.error(RuntimeError(f"{where}: {type(error).__name__}: {error}; this was not foreseen"))
        return FAILED
