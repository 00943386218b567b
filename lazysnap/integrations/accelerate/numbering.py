"""The directories that Accelerate names, ``<project_dir>/checkpoints/checkpoint_N``, with ``total_limit``."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

_NAME = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")


class Numbering:
    """The numbered directories of one project. Methods block only for listings."""

    def __init__(self, project: Any) -> None:
        """``project``: the ``ProjectConfiguration`` of the accelerator, whose ``iteration`` is the next number."""
        self._project = project

    @property
    def is_automatic(self) -> bool:
        """True if Accelerate, not the program, names the directories of checkpoints."""
        return bool(self._project.automatic_checkpoint_naming)

    def make_next(self, directory: str | None) -> tuple[str, int]:
        """Make the directory of the next checkpoint. Return it and its number.

        ``directory``: the given directory, unless naming is automatic. Raises: OSError.
        """
        number: int = self._project.iteration
        if self.is_automatic:
            existing = self._numbers()
            if existing:
                number = max(number, existing[-1] + 1)
            directory = self._path_of(number)
        assert directory is not None
        os.makedirs(directory, exist_ok=True)
        return directory, number

    def continue_behind(self, number: int) -> None:
        """Set the number of the next checkpoint to the one after this."""
        self._project.iteration = number + 1

    def continue_behind_loaded(self, directory: str) -> None:
        """Continue the numbers after a checkpoint that Accelerate loaded."""
        number = _number_of(directory)
        if self.is_automatic and number is not None:
            self.continue_behind(number)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Let Accelerate save into a given directory, by disabling automatic naming within the context."""
        is_automatic = self._project.automatic_checkpoint_naming
        iteration = self._project.iteration
        self._project.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            self._project.automatic_checkpoint_naming = is_automatic
            self._project.iteration = iteration

    def newest_first(self) -> list[str]:
        """Return the directories of all checkpoints, if naming is automatic."""
        if not self.is_automatic:
            return []
        return [self._path_of(number) for number in reversed(self._numbers())]

    def superseded(self, directory: str) -> list[str]:
        """Return the oldest checkpoints beyond ``total_limit`` that are older than ``directory``, which is durable."""
        limit = self._project.total_limit
        newest = _number_of(directory)
        if not self.is_automatic or limit is None or newest is None:
            return []
        numbers = self._numbers()
        num_surplus = max(0, len(numbers) - limit)
        return [self._path_of(number) for number in numbers[:num_surplus] if number < newest]

    @property
    def _root(self) -> str:
        return os.path.join(self._project.project_dir, "checkpoints")

    def _path_of(self, number: int) -> str:
        return os.path.join(self._root, f"checkpoint_{number}")

    def _numbers(self) -> list[int]:
        """Return the numbers of the existing checkpoints, in order."""
        if not os.path.isdir(self._root):
            return []
        numbers = []
        for name in os.listdir(self._root):
            number = _number_of(name)
            if number is not None:
                numbers.append(number)
        return sorted(numbers)


def _number_of(directory: str) -> int | None:
    """Return the number in the name of a directory; ``None`` for one that the program named."""
    match = _NAME.fullmatch(os.path.basename(directory))
    if match is None:
        return None
    return int(match[1])
