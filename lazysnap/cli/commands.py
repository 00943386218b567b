"""The table of all commands, their parser, and ``main``, which runs one command."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import lazysnap
from lazysnap.cli.advise import parse_params, parse_time
from lazysnap.cli.chaos import FAULTS, parse_faults
from lazysnap.cli.output import BAD, FAILED, INTERRUPTED, Output, command_words
from lazysnap.errors import FormatError, LazySnapError
from lazysnap.exports.target import FORMATS
from lazysnap.levels.redaction import Redaction

logger = logging.getLogger(__name__)

_EXIT_CODES = "Exit codes: 0 good, 1 something bad was found, 2 failed or bad usage, 130 interrupted."


# ---------------------------------------------------------------- the table


class Argument:
    """One argument of a command, as ``ArgumentParser.add_argument`` takes it."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings


@dataclass(frozen=True)
class Command:
    """One command."""

    summary: str
    """The line in the list of commands."""
    run: str
    """Module below ``lazysnap.cli``, imported when the command runs, and its function."""
    arguments: tuple[Argument, ...]
    example: str
    details: str = ""
    """Further sentences of ``--help``."""
    has_result: bool = True
    """True if it has ``--json``. False for a command that ends as the user's own program does."""


def parse_option(text: str) -> tuple[str, Any]:
    """Parse ``KEY=VALUE``. The value is JSON if it is valid JSON, else text.

    Raises: argparse.ArgumentTypeError, without the value: it may be a secret.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


_KEY_VALUE: dict[str, Any] = {"metavar": "KEY=VALUE", "type": parse_option, "action": "append", "default": []}
_URL_HELP = "directory or URL with snapshots (a level), e.g. runs/lazysnap or s3://bucket/run"
_JSON = Argument("--json", action="store_true", help="one JSON object on stdout; messages on stderr")
_STORAGE_OPTION = Argument("--storage-option", help="for the fsspec file system (may be repeated)", **_KEY_VALUE)
_RUN = Argument("--run", metavar="ID", help="the run whose id begins so; `lazysnap ls` shows them")
_URL = Argument("url", metavar="URL", help=_URL_HELP)
_ANY_URL = Argument("url", metavar="URL", nargs="?", help=_URL_HELP)
_WANTED = Argument("wanted", metavar="STEP|NAME|latest", help="a step, a name given by keep, or 'latest'")
_WORDS = Argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command, after --")

COMMANDS = {
    "ls": Command(
        "list the snapshots of a directory or URL",
        "inspecting:list_snapshots",
        (_URL, _RUN, _STORAGE_OPTION),
        "lazysnap ls runs/lazysnap",
        "Lists all runs, or --run. Reads no tensors.",
    ),
    "show": Command(
        "show the contents of a snapshot, without reading its data",
        "inspecting:show",
        (
            _URL,
            _WANTED,
            _RUN,
            Argument("--all", action="store_true", help="also each tensor and each value of the small state"),
            _STORAGE_OPTION,
        ),
        "lazysnap show runs/lazysnap latest",
        "Without --run a step, a name or 'latest' is that of the newest run that has it.",
    ),
    "verify": Command(
        "read every byte and check every checksum",
        "inspecting:verify",
        (
            _URL,
            _RUN,
            Argument("--step", type=int, action="append", help="only this step (may be repeated)"),
            _STORAGE_OPTION,
        ),
        "lazysnap verify s3://bucket/run --step 4000",
        "Verifies all runs, or --run. Exit code 1 if anything is damaged, or there are no snapshots.",
    ),
    "prune": Command(
        "delete old snapshots, and files of dead writers",
        "prune:run",
        (
            _URL,
            _RUN,
            Argument("--keep-last", type=int, metavar="N", help="keep the newest N complete snapshots of each run"),
            Argument("--keep-every", type=int, metavar="N", help="and those whose step is a multiple of N"),
            Argument("--name", help="remove this name, so that its snapshots may be deleted"),
            Argument("--yes", action="store_true", help="delete; without it the command only shows what it would"),
            _STORAGE_OPTION,
        ),
        "lazysnap prune runs/lazysnap --keep-last 3",
        "Prunes all runs, or --run. Shows what it deletes. Without --keep-last it deletes only files "
        "of dead writers. Named snapshots and the newest complete one of each run always stay.",
    ),
    "copy": Command(
        "copy snapshots to another directory or URL, verified",
        "copying:copy",
        (
            _URL,
            Argument("to", metavar="URL", help="the level to copy to"),
            _RUN,
            Argument("--step", metavar="STEP|NAME|latest", action="append", help="only this one (may be repeated)"),
            _STORAGE_OPTION,
            Argument("--to-option", help="as --storage-option, only for the level to copy to", **_KEY_VALUE),
        ),
        "lazysnap copy runs/lazysnap s3://bucket/run --step latest",
        "Copies all runs, or --run: complete snapshots, the newest first. Valid existing copies are not "
        "copied again. With --to-option, --storage-option is only for the first URL.",
    ),
    "export": Command(
        "write a snapshot in the format of another tool",
        "copying:export",
        (
            _URL,
            _WANTED,
            Argument("--to", required=True, metavar="PATH", help="FILE.safetensors, FILE.ckpt or a directory"),
            Argument("--format", choices=FORMATS, help="if the name does not determine it"),
            _RUN,
            Argument("--config", metavar="DIR", help="huggingface: copy config and tokenizer files from there"),
            Argument("--only", metavar="NAME", help="only what is below NAME in the state, without that prefix"),
            _STORAGE_OPTION,
        ),
        "lazysnap export runs/lazysnap latest --to model.safetensors",
        "Without --run a step, a name or 'latest' is that of the newest run that has it.",
    ),
    "status": Command(
        "show the trainings of this machine, and what a crash would cost now",
        "status:run",
        (
            Argument("job", nargs="?", metavar="JOB", help="only this job_id, or URL of a first level"),
            Argument("--prometheus", action="store_true", help="the numbers of --json as text for Prometheus"),
        ),
        "lazysnap status",
        "Asks the keepers of this user, which hold snapshots in memory, for at most 2 seconds each. Reads no storage.",
    ),
    "stop": Command(
        "end the process that holds the memory of a dead training",
        "keepers:stop",
        (
            Argument("job", metavar="JOB", help="the job's SnapshotConfig.job_id, or the URL of its first level"),
            Argument("--force", action="store_true", help="also a keeper whose newest capture cannot be stored"),
            Argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait at most so long (60)"),
        ),
        "lazysnap stop runs/lazysnap",
        "The keeper first stores its newest capture. That of a training that runs stays. `lazysnap status` lists jobs.",
    ),
    "report": Command(
        "show where the time of a run went, and the cost of each interruption",
        "report:run",
        (
            Argument("urls", nargs="+", metavar="URL", help="the first level of the job; of several nodes, of each"),
            _RUN,
            Argument("--html", metavar="FILE", help="write a page with pictures, too"),
            _STORAGE_OPTION,
        ),
        "lazysnap report runs/lazysnap --html report.html",
        "Shows the newest run, or --run.",
    ),
    "advise": Command(
        "compute how often to capture and store, memory, goodput",
        "advise:run",
        (
            _ANY_URL,
            Argument("--params", type=parse_params, metavar="N", help="of a model whose memory is estimated: 7b, 350m"),
            Argument(
                "--bytes-per-param", type=float, default=12.0, metavar="N", help="12: AdamW in fp32 (default); 4: SGD"
            ),
            Argument("--ranks", type=int, metavar="N", help="processes (those of the run, or 1 for each node)"),
            Argument("--nodes", type=int, metavar="N", help="machines they run on (those of the run, or 1)"),
            Argument(
                "--sharding",
                choices=("ddp", "fsdp"),
                default="ddp",
                help="ddp: each rank has the whole state (default); fsdp: a part",
            ),
            Argument("--step-time", type=parse_time, metavar="TIME", help="time of a step: 0.4s"),
            Argument("--persist", type=parse_time, metavar="TIME", help="time until a snapshot is durable: 30s"),
            Argument("--mtbf", type=parse_time, metavar="TIME", help="time between failures of the training: 3h"),
            _STORAGE_OPTION,
        ),
        "lazysnap advise --params 7b --nodes 2 --ranks 16 --step-time 0.8s --persist 30s --mtbf 3h",
        "With a URL it uses the times of its newest run, unless options give them. With --params it also estimates "
        "the memory that a model of that size needs.",
    ),
    "doctor": Command(
        "check this node and a level before a training",
        "doctor:run",
        (
            _ANY_URL,
            Argument("--peer", action="append", default=[], metavar="HOST", help="another node (may be repeated)"),
            _STORAGE_OPTION,
        ),
        "lazysnap doctor s3://bucket/run --peer node1",
        "Writes 64 MB to the level, reads and deletes them. Exit code 1 if something is bad.",
    ),
    "chaos": Command(
        "kill your own training on purpose, and check its restart",
        "chaos:run",
        (
            Argument("--faults", type=parse_faults, default=[*FAULTS], metavar="LIST", help=",".join(FAULTS)),
            Argument("--seed", type=int, default=1603, help="determines the times of the faults (1603)"),
            Argument("--result", metavar="GLOB", help="files to compare, besides the numbers that it prints"),
            Argument("--may-lose", type=int, metavar="N", help="steps that may be trained again (default: any number)"),
            Argument("--deadline", type=float, metavar="SECONDS", help="of a run and its restarts (60 + 5 x a run)"),
            _WORDS,
        ),
        "lazysnap chaos -- python train.py",
    ),
    "demo": Command("kill a real training, resume it, compare bit for bit", "chaos:run_demo", (), "lazysnap demo"),
    "run": Command(
        "run a training, and restart it quickly after a crash",
        "commands:run_again",
        (
            Argument("--max-restarts", type=int, default=10, metavar="N", help="restarts in all (10)"),
            _WORDS,
        ),
        "lazysnap run -- python train.py",
        has_result=False,
    ),
    "worker": Command(
        "start a worker of torchrun quickly after a crash",
        "commands:run_worker",
        (_WORDS,),
        "torchrun --no-python --max-restarts 10 lazysnap worker -- python train.py",
        has_result=False,
    ),
}


# ---------------------------------------------------------------- the parser


class _Parser(argparse.ArgumentParser):
    """Refuses arguments in JSON too, if the result was to be JSON."""

    def __init__(self, *, as_json: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._as_json = as_json

    def error(self, message: str) -> NoReturn:
        if self._as_json:
            words = self.prog.split()
            command = None
            if len(words) > 1:
                command = words[-1]
            result = {"command": command, "ok": False, "error": f"usage: {message}"}
            sys.stdout.write(json.dumps(result) + "\n")
        super().error(message)


def parser(*, as_json: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all commands. ``as_json``: usage errors are printed as JSON, too."""
    root = _Parser(
        as_json=as_json,
        prog="lazysnap",
        description="Look at snapshots of training runs, check, copy, export and delete them.",
        epilog=f"`lazysnap COMMAND --help` explains one. {_EXIT_CODES}",
    )
    root.add_argument("--version", action="version", version=f"lazysnap {lazysnap.__version__}")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        details = f"{command.summary[0].upper()}{command.summary[1:]}. {command.details}"
        example = f"Example: {command.example}"
        added = subparsers.add_parser(name, as_json=as_json, help=command.summary, description=details, epilog=example)
        arguments = list(command.arguments)
        if command.has_result:
            arguments.append(_JSON)
        for argument in arguments:
            added.add_argument(*argument.names, **argument.settings)
        added.set_defaults(refuse=added.error, json=False)
    return root


# ---------------------------------------------------------------- running


def main(arguments: Sequence[str]) -> int:
    """Run one command. Return its exit code: 0 good, 1 something bad was found, 2 failed, 130 interrupted.

    Blocks. Raises: SystemExit, for arguments that argparse refuses (code 2), ``--help`` and ``--version``.
    """
    args, unknown = parser(as_json="--json" in arguments).parse_known_args(arguments)
    if unknown:
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of this command
    options = [dict(getattr(args, name, ())) for name in ("storage_option", "to_option")]
    output = Output(args.command, as_json=args.json, redaction=Redaction({"options": options}))
    module, _, function = COMMANDS[args.command].run.partition(":")
    try:
        code: int = getattr(import_module(f"lazysnap.cli.{module}"), function)(args, output)
        return code
    except KeyboardInterrupt:
        output.error("interrupted; nothing half-written is left under its name")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the result closed the pipe; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except FormatError as error:
        output.error(str(error))
        return BAD
    except (LazySnapError, OSError) as error:
        output.error(str(error))
        return FAILED
    except Exception as error:
        logger.debug("%s failed", args.command, exc_info=True)
        output.error(f"this is a bug in lazysnap; please report it: {type(error).__name__}: {error}")
        return FAILED


def run_again(args: argparse.Namespace, output: Output) -> int:
    """Run the command until it ends well, and end as its last start. Blocks. Raises: ConfigError."""
    from lazysnap.warm.client import end_as
    from lazysnap.warm.supervisor import supervise

    end_as(supervise(command_words(args), args.max_restarts))


def run_worker(args: argparse.Namespace, output: Output) -> int:
    """Become a worker (``cli.main`` starts most without this parser). Does not return. Raises: ConfigError."""
    from lazysnap.warm.client import main as worker

    worker(command_words(args))
