"""The Python interpreter that a command line would start, if it is one."""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

_FLAGS = frozenset("bBdOPqRuvx")
"""Options of Python with which a warm start is possible."""
_NAME = re.compile(r"python[\d.]*t?")
_LONG = re.compile(rb"#!/bin/sh\n'''exec' (?:\"([^\"]+)\"|'([^']+)'|(\S+)) \"\$0\" \"\$@\"")
"""The first lines of a console script whose interpreter has a long path."""


@dataclass(frozen=True)
class PythonCommand:
    """A command line that starts a Python program."""

    python: str
    """Path of the interpreter."""
    argv: tuple[str, ...]
    """Its arguments as the kernel would pass them, its name first."""
    name: str
    """The name that the kernel gives the process."""


def python_command(words: Sequence[str]) -> PythonCommand | str:
    """Return the command that a shell would start for ``words``, or the reason why no warm parent can start it."""
    path = shutil.which(words[0])
    if path is None:
        return f"{words[0]} is not found"
    with open(path, "rb") as file:
        head = file.read(4096)
    if head.startswith(b"#!"):
        interpreter = _shebang(head)
        is_direct = os.path.basename(interpreter[0]) != "env" and not _LONG.match(head)
        if os.path.basename(interpreter[0]) == "env":
            interpreter = interpreter[1:] or [""]
        if not _NAME.fullmatch(os.path.basename(interpreter[0])):
            return f"{path} is no Python program"
        command = python_command([*interpreter, path, *words[1:]])
        if is_direct and isinstance(command, PythonCommand):
            return replace(command, name=os.path.basename(path))
        return command
    if not head.startswith(b"\x7fELF") or not _NAME.fullmatch(os.path.basename(path)):
        return f"{path} is no Python interpreter"
    refused = _refused_option(words[1:])
    if refused:
        return f"python {refused} is not started warm"
    return PythonCommand(path, tuple(words), os.path.basename(path))


def _shebang(head: bytes) -> list[str]:
    match = _LONG.match(head)
    if match:
        return [os.fsdecode(next(filter(None, match.groups())))]
    return [os.fsdecode(word) for word in head[2:].split(b"\n")[0].split(None, 1)] or [""]


def _refused_option(arguments: Sequence[str]) -> str | None:
    """Return the first option with which Python does not import ``sitecustomize``, or which is unknown."""
    rest = iter(arguments)
    for word in rest:
        if word == "--check-hash-based-pycs":
            next(rest, None)
        elif not word.startswith("-") or word == "-":
            return None
        elif word.startswith("--"):
            return word
        else:
            for place, letter in enumerate(word[1:], start=2):
                if letter in "cm":
                    return None
                if letter in "WX":
                    if not word[place:]:
                        next(rest, None)
                    break
                if letter not in _FLAGS:
                    return f"-{letter}"
    return "without a program"
