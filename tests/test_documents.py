"""What the pages show works: blocks of Python are run, command lines too, and links lead somewhere."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import document_preludes
import pytest
from support.documents import PAGES, ROOT, all_blocks, anchors, command_lines, inline_commands, links
from support.newest import PROVES
from support.programs import ENVIRONMENT
from support.waiting import until
from torch.distributed.run import get_args_parser

from benchmarks.__main__ import parser as benchmarks_parser
from lazysnap.cli.commands import parser

pytestmark = pytest.mark.xdist_group("documents")
BLOCKS = all_blocks("python")
LINES = dict.fromkeys(line for _, line in command_lines())
SYNOPSIS = [line for key, line in command_lines() if key == "cli.md#the-command-line"]
CALLS = [line for line in LINES if line.startswith("lazysnap ") and line not in SYNOPSIS]
CONCRETE = {text for _, text in inline_commands("lazysnap") if re.search(r" runs/| --params", text)}
NOT_RUN = {
    "lazysnap chaos": "minutes: tests/cli/test_chaos.py",
    "lazysnap run": "cold starts: tests/warm, and below",
}
"""Command lines that are parsed and no more, by how they begin, and why."""
KILLED_AT = "engine.begun:3:kill"
RESUMES = re.compile(r"(restore|load_state)\(\"latest\"|(ckpt_path|resume_from_checkpoint)=\"latest\"")
TRAINS_NOTHING = {"coming-from.md#weights-that-you-have"}
NEEDS = {"loggers.md#wb": "wandb", "loggers.md#mlflow": "mlflow", "loggers.md#tensorboard": "tensorboard"}
"""Packages of blocks that the tests do not install: such a block runs where its package is there."""
PROGRAM = document_preludes.__file__
CALL = "import os, sys; from lazysnap.cli import main; os.chdir(sys.argv.pop(1)); sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="session")
def bucket(s3_server):
    """The environment in which ``s3://bucket`` is on the server of the tests."""
    headers = s3_server.sign("PUT", "/bucket")
    request = urllib.request.Request(f"{s3_server.endpoint}/bucket", method="PUT", headers=headers)
    urllib.request.urlopen(request).close()
    options = s3_server.options()
    names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "endpoint_url"}
    return {name: options[option] for name, option in names.items()} | {"AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def start(zygote, tmp_path):
    """Start the program of a block, always in the same directory; return its exit status and what it said."""

    output, python = tmp_path / "output", zygote.python(tmp_path)

    def start(block, **environment):
        words = [PROGRAM, str(tmp_path / "empty"), block.key]
        environment |= {"COLUMNS": "150", "PYTHON_OF_RANKS": str(python)}
        return zygote.run(words, environment, output), output.read_text()

    return start


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_in_an_empty_directory_and_resumes_if_it_says_so(start, block, request):
    if block.key in NEEDS and importlib.util.find_spec(NEEDS[block.key]) is None:
        pytest.skip(f"{NEEDS[block.key]} is not installed")
    environment = request.getfixturevalue("bucket") if "s3://bucket" in block.code and "read" in block.code else {}
    resumes = RESUMES.search(block.code) and block.key not in TRAINS_NOTHING
    if resumes:
        status, said = start(block, LAZYSNAP_FAULT=KILLED_AT)
        assert status == -signal.SIGKILL, said

    status, said = start(block, **environment)

    assert status == 0, said
    assert bool(re.search(r"^lazysnap: resumed step \d+ of run .* from memory", said, re.M)) == bool(resumes), said


def shape(text):
    """Return a text without its numbers, units, ids and places."""
    text = re.sub(r"(?<![\w.])(/|runs/)[\w./-]+", "PLACE", " ".join(text.split()))
    text = re.sub(r"\b[0-9a-f]{8}\b", "ID", text)
    return re.sub(r"\d[\d.,]*( (ms|s|min|[kMG]?B)\b)?", "N", text).replace("steps", "step")


def heads(text):
    """Return the heads of all columns of all tables in a text."""
    lines = [line for line, rule in pairwise(text.splitlines()) if rule.startswith("──")]
    return {head for line in lines for head in re.split(r" {2,}", line.strip())}


@pytest.mark.slow
def test_what_pages_quote_is_what_is_said_today(start, zygote, tmp_path):
    quoted = {block.key: block.code for block in all_blocks("text")}
    [block] = [block for block in BLOCKS if block.key == "README.md#start"]
    place, output = str(tmp_path / "empty"), tmp_path / "said"

    def call(*words):
        assert zygote.run(["-c", CALL, place, *words], {"COLUMNS": "200"}, output) == 0, output.read_text()
        return output.read_text()

    # Behind the start, when memory is there: two captures in a row are whole.
    assert start(block, LAZYSNAP_FAULT="engine.begun:20:kill")[0] == -signal.SIGKILL
    status = call("status", f"{place}/lazysnap")
    _, said = start(block, **PROVES)
    until(lambda: "ended well" in call("report", "lazysnap"))

    texts = quoted.pop("README.md#start") + quoted.pop("memory.md#memory")
    for part in filter(None, re.split(r";|lazysnap: ", texts)):
        assert shape(part) in shape(said), f"{part} is not in {said}"
    tables = {"operations.md#what-would-survive-now": status, "report.md#what-a-run-cost": output.read_text()}
    for key, real in tables.items():
        missing = heads(quoted.pop(key)) - heads(real)
        assert not missing, f"{key}: {missing} in none of {real}"
    assert not quoted, "a quoted text that nothing compares"


def test_each_prelude_belongs_to_a_block():
    assert {*document_preludes.PRELUDES, *TRAINS_NOTHING} <= {block.key for block in BLOCKS}


def parses(line):
    """Return what the command line means, ``None`` if it is refused."""
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        return parser().parse_args(shlex.split(line)[1:])


def subcommands(root):
    [subparsers] = [action for action in root._actions if isinstance(action, argparse._SubParsersAction)]
    return subparsers.choices


def options_of(command):
    return {option for action in subcommands(parser())[command]._actions for option in action.option_strings}


@pytest.fixture(scope="session")
def trained(zygote, tmp_path_factory):
    """A run of a model of Transformers, and a folder of that model."""
    place, output = tmp_path_factory.mktemp("trained"), tmp_path_factory.mktemp("output") / "output"
    assert zygote.run([PROGRAM, str(place), "cli.md#export"], {}, output) == 0, output.read_text()
    until(lambda: list(place.rglob("events-*")))
    return place


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in sorted({*CALLS, *CONCRETE}) if not line.startswith(tuple(NOT_RUN))])
def test_a_command_line_does_what_the_page_says_beside_a_small_run(line, zygote, start, trained, tmp_path, request):
    there = tmp_path / "there"
    for name in ("runs/gpt", "runs/a", "runs/a/_lazysnap", "runs/lazysnap", "mnt/node0/run", "mnt/node1/run"):
        shutil.copytree(trained / "runs" / "lazysnap", there / name)
    shutil.copytree(trained / "model", there / "base-model")
    environment = {"COLUMNS": "150"}
    if "s3://" in line:
        environment |= request.getfixturevalue("bucket")
        [block] = [block for block in BLOCKS if block.key.startswith("format.md#events")]
        assert start(block, **environment)[0] == 0
    words = shlex.split(line.replace("/mnt/", "mnt/"))

    status = zygote.run(["-c", CALL, str(there), *words[1:]], environment, tmp_path / "said")

    assert status == 0, (tmp_path / "said").read_text()
    files = [word for option, word in pairwise(words) if option in ("--to", "--html")]
    assert [name for name in files if not (there / name).exists()] == []


def test_each_line_that_is_not_run_is_on_a_page():
    assert [
        start for start in NOT_RUN if not any(line.startswith(start) for line in LINES if line not in SYNOPSIS)
    ] == []


@pytest.mark.parametrize("line", CALLS)
def test_a_command_line_of_a_page_is_one_that_the_command_takes(line):
    assert parses(line), line


@pytest.mark.slow
def test_commands_in_the_prose_have_the_options_that_it_names():
    commands = inline_commands("lazysnap")
    assert len(commands) > 30
    for page, text in commands:
        _, command, *words = shlex.split(text)
        known = options_of(command)
        assert parses(text) or {word for word in words if word.startswith("--")} <= known, f"{page}: {text}"


def test_the_synopsis_has_every_command_and_every_option():
    shown = {line.split()[1]: line for line in SYNOPSIS}
    assert set(shown) == set(subcommands(parser()))
    shared = {"-h", "--help", "--json", "--storage-option", "--run"}
    for command, line in shown.items():
        assert set(re.findall(r"--[a-z][a-z-]*", line)) == options_of(command) - shared, line


def target_of(name):
    """Return what a target of the Makefile runs of the benchmarks."""
    rule = re.search(rf"^{name}:.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), flags=re.M)
    assert rule, f"make {name}"
    return re.findall(r"-m benchmarks (\w+)", rule[1])


def check_make(*words):
    """Targets that are there, and variables whose value is one of arguments that the benchmark takes."""
    values = [word for word in words if "=" in word]
    for target in {*words} - {*values, "|"}:
        benchmark = target_of(target)
        for name, _, value in (word.partition("=") for word in values):
            assert re.search(rf"\$\$?[({{]{name}\b", (ROOT / "Makefile").read_text()), name
            if name != "PYTHON":
                assert check_benchmarks("-m", "benchmarks", *benchmark, *shlex.split(value))


def check_benchmarks(_, module, what, *words):
    assert module == "benchmarks"
    if "|" in what:  # the synopsis names them all, but the one that has a line of its own
        assert {*what.split("|"), "compare"} == set(subcommands(benchmarks_parser()))
        return True
    return benchmarks_parser().parse_args([what, *(word for word in words if "[" not in word and "]" not in word)])


def check_pip(verb, *words):
    """An install of this package, with extras that it has."""
    extras = {extra for word in words for list in re.findall(r"\[(.+)\]", word) for extra in list.split(",")}
    assert verb == "install"
    assert extras
    assert extras <= set(importlib.metadata.metadata("lazysnap").get_all("Provides-Extra"))


def check_torchrun(*words):
    """Options of torchrun, and a script that is there or a command of lazysnap."""
    args = get_args_parser().parse_args(words)
    if args.no_python:
        assert parses(shlex.join([args.training_script, *args.training_script_args]))
    else:
        known = set(re.findall(r"--[\w-]+", (ROOT / args.training_script).read_text()))
        assert {word for word in args.training_script_args if word.startswith("--")} <= known


CHECKS = {"make": check_make, "python": check_benchmarks, "pip": check_pip, "torchrun": check_torchrun}
OTHERS = [line for line in LINES if not line.startswith(("lazysnap ", "export "))]
OTHERS += [text for program in ("make", "python -m benchmarks") for _, text in inline_commands(program)]


@pytest.mark.parametrize("line", OTHERS)
def test_other_command_lines_name_what_is_there(line):
    program, *words = shlex.split(line)
    CHECKS[program](*words)


TRAIN = """
import pathlib, sys

try:
    open("crashed", "x")
except FileExistsError:
    pathlib.Path("done").write_text(" ".join(sys.argv[1:]))
else:
    sys.exit(3)
"""


RESTARTS = [
    line for line in LINES if line not in SYNOPSIS and re.match(r"lazysnap run|torchrun .* lazysnap worker", line)
]


@pytest.mark.slow
@pytest.mark.parametrize("line", RESTARTS)
def test_a_command_is_started_again_after_a_crash_as_the_page_says(line, tmp_path):
    for path in (tmp_path / "train.py", tmp_path / "package" / "train.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(TRAIN)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **ENVIRONMENT, "PATH": path, "LAZYSNAP_RUNTIME_DIR": f"{tmp_path}/runtime"}

    shell = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(["bash", "-c", line], check=False, **shell)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == ("--flags" if "--flags" in line else "")


def test_links_within_the_documents_lead_to_a_file_and_a_heading():
    for page in PAGES:
        for target in links(page):
            name, _, anchor = target.partition("#")
            if "://" not in target:
                file = page.parent / name if name else page
                assert file.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_links_to_elsewhere_are_well_formed_and_all_of_them_are_on_the_site_where_make_links_follows_them():
    of_site = {target for page in PAGES if page.parent == ROOT / "docs" for target in links(page)}
    for page in PAGES:
        for target in filter(re.compile(r"\w+:").match, links(page)):
            url = urlsplit(target)
            assert (url.scheme, bool(re.fullmatch(r"[\w-]+(\.[\w-]+)+", url.netloc))) == ("https", True), target
            assert target in of_site, f"{page.name}: {target} is on no page of docs/"
