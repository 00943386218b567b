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
from lazysnap.cli.chaos import FAULTS, parse_faults
from lazysnap.cli.output import BAD, FAILED, INTERRUPTED, Output
from lazysnap.cli.sizes import DTYPES, OPTIMIZERS, parse_params, parse_time
from lazysnap.cli.stores import parse_option
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.exports.target import FORMATS
from lazysnap.levels.redaction import Redaction

logger = logging.getLogger(__name__)

_URL: dict[str, Any] = {"help": "path or fsspec URL of a level, e.g. runs/lazysnap or s3://bucket/run"}
_OPTION: dict[str, Any] = {"metavar": "KEY=VALUE", "type": parse_option, "action": "append", "default": []}
_COMMAND: dict[str, Any] = {"nargs": argparse.REMAINDER, "metavar": "-- COMMAND"}


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
    only_run = argparse.ArgumentParser(add_help=False)
    only_run.add_argument("--run", metavar="ID", help="only the run with these first digits, see `lazysnap ls`")
    one = argparse.ArgumentParser(add_help=False, parents=[level])
    one.add_argument("wanted", metavar="STEP|NAME|latest", help="a step, a name given by keep, or 'latest'")
    one.add_argument("--run", metavar="ID", help="the run with these first digits; default: the newest that fits")

    def command(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, parents=parents)

    command("ls", "list the snapshots of a directory or URL", level, only_run)
    add = command("verify", "read every byte and check every checksum", level, only_run).add_argument
    add("--step", type=int, action="append", help="only this step (may be repeated)")
    add = command("show", "what a snapshot holds, without reading its data", one).add_argument
    add("--tensors", action="store_true", help="only the table of tensors")
    add("--state", action="store_true", help="only the small state")
    add("--full", action="store_true", help="shorten nothing")
    add = command("prune", "delete old snapshots, and what dead writers left", level, only_run).add_argument
    add("--keep-last", type=int, metavar="N", help="keep the newest N complete snapshots of each run")
    add("--keep-every", type=int, metavar="N", help="and those whose step is a multiple of N")
    add("--name", help="take this name from the snapshots that have it, which ends their protection")
    add("--dry-run", action="store_true", help="only say what would be deleted")
    add("--yes", action="store_true", help="do not ask")
    copy = command("copy", "copy snapshots to another level, verified", level, only_run)
    copy.add_argument("to", metavar="URL", help="the level to copy to")
    add = copy.add_mutually_exclusive_group().add_argument
    add("--all", action="store_true", help="every complete snapshot, the newest first (default)")
    add("--latest", action="store_true", help="only the newest complete one")
    add("--step", metavar="STEP|NAME", action="append", help="only this one (may be repeated)")
    copy.add_argument("--from-option", help="as --storage-option, only for reading", **_OPTION)
    copy.add_argument("--to-option", help="as --storage-option, only for writing", **_OPTION)
    add = command("export", "write a snapshot in the format of another tool", one).add_argument
    add("--to", required=True, metavar="PATH", help="FILE.safetensors, FILE.ckpt or a directory")
    add("--format", choices=FORMATS, help="if the name does not tell it")
    add("--config", metavar="DIR", help="huggingface: copy config and tokenizer files from there")
    add("--only", metavar="NAME", help="only what is below NAME in the state, without that prefix")
    add("--force", action="store_true", help="replace an earlier export, or an empty directory")
    add("--keep-types", action="store_true", help=".ckpt: also types that weights_only=True refuses")
    add = command("stop", "end keepers that a training of this node left", common).add_argument
    add("job", metavar="JOB", help="the job's SnapshotConfig.job_id, or the URL of its first level")
    add("--force", action="store_true", help="also a keeper whose newest capture cannot be stored")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait at most so long (60)")
    add = command("status", "the keepers of this node, what would survive now", common).add_argument
    add("job", nargs="?", metavar="JOB", help="only this job_id, or URL of a first level")
    again = "show it again every so many seconds (1), until Ctrl-C"
    add("--watch", nargs="?", type=float, const=1.0, metavar="SECONDS", help=again)
    add("--prometheus", action="store_true", help="the numbers of --json in the text format of Prometheus")
    add = command("report", "goodput of a run, the cost of each interruption", runs).add_argument
    add("--html", metavar="FILE", help="write a page with pictures, too")
    command("demo", "kill a real training, resume it, compare bit for bit", common)
    add = command("chaos", "run your own training under faults, and judge it", common).add_argument
    add("--faults", type=parse_faults, default=[*FAULTS], metavar="LIST", help=f"of {','.join(FAULTS)} (all)")
    add("--seed", type=int, default=1603, help="chooses the moments of the faults (1603)")
    add("--result", metavar="GLOB", help="files to compare, beside the numbers that the command prints")
    add("--may-lose", type=int, metavar="N", help="steps that may be repeated (any, if it resumes at all)")
    add("--deadline", type=float, metavar="SECONDS", help="of a run (5 times the undisturbed one + 60)")
    add("words", **_COMMAND)
    add = command("doctor", "check this node and a level before a training", any_level).add_argument
    add("--peer", action="append", default=[], metavar="HOST", help="another node (may be repeated)")
    add("--size-mb", type=int, default=256, metavar="N", help="bytes written to the level (256 MB)")
    add = command("run", "start a training again after a crash, warm", common).add_argument
    add("--max-restarts", type=int, default=10, metavar="N", help="restarts in all (10)")
    same = "no restart after two equal exits within that time without a new step (30)"
    add("--same-exit-within", type=float, default=30.0, metavar="SECONDS", help=same)
    add("words", **_COMMAND)
    command("worker", "a warm start inside a launcher such as torchrun", common).add_argument("words", **_COMMAND)
    advise = command("advise", "how often to capture and store, memory, goodput", any_level)
    add = advise.add_argument_group("times; those of a run are measured").add_argument
    add("--mtbf", type=parse_time, metavar="TIME", help="mean time between failures of the whole training: 3h")
    add("--step", type=parse_time, metavar="TIME", help="time of a step: 0.4s")
    add("--persist", type=parse_time, metavar="TIME", help="time until a snapshot is durable: 30s")
    add = advise.add_argument_group("a training that is not started yet").add_argument
    add("--params", type=parse_params, metavar="N", help="parameters that are trained: 7b, 350m, 125000000")
    add("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
    add("--dtype", choices=sorted(DTYPES), default="fp32", help="of weights and optimizer state (fp32)")
    add("--ranks", type=int, help="processes of the training (those of the run, or 1 for each node)")
    add("--nodes", type=int, help="machines they run on (those of the run, or 1)")
    add("--sharding", choices=("ddp", "fsdp"), default="ddp", help="each rank has all, or a part (ddp)")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit code: 0 good, 1 something bad was found, 2 could not look, 130 interrupted.

    Blocks. Raises: SystemExit, for arguments that argparse refuses (code 2), ``--help`` and ``--version``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser(as_json="--json" in arguments).parse_args(arguments)
    options = [pair for name in ("storage_option", "from_option", "to_option") for pair in getattr(args, name, ())]
    secrets = Redaction({"secret": [value for _, value in options]})
    output = Output(args.command, as_json=args.json, redaction=secrets)
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
        kind = type(error).__name__
        output.error(RuntimeError(f"{kind}: {error}; this is a bug in lazysnap, please report it"))
        return FAILED
