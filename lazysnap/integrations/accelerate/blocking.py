"""Checkpoints that Accelerate writes while training waits. They become complete in one act."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from lazysnap.errors import LevelUnavailable
from lazysnap.exports.folder import filled


def save_blocking(accelerator: Accelerator, directory: str, save: Callable[[str], Any]) -> None:
    """Call ``save`` with a subdirectory of ``directory``, then complete the checkpoint (``folder.filled``).

    ``save``: stock ``save_state``, called with one path on every rank. All ranks see the same file system.
    Collective. Blocks. Raises: OSError and what ``save`` raises on this rank; LevelUnavailable, if another rank failed.
    A failed save leaves an earlier checkpoint in ``directory`` as it was.
    """
    with contextlib.ExitStack() as main:
        place = filled(directory, {"layout": "accelerate"})
        inner = by_main(accelerator, directory, lambda: os.readlink(main.enter_context(place)))
        project = accelerator.project_configuration

        def write() -> None:
            naming, iteration = project.automatic_checkpoint_naming, project.iteration
            project.automatic_checkpoint_naming = False  # else stock would choose another place
            try:
                save(inner)
            finally:
                project.automatic_checkpoint_naming, project.iteration = naming, iteration

        together(directory, write)
        by_main(accelerator, directory, main.close)


def by_main(accelerator: Accelerator, directory: str, work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` on the main process, on all ranks. Collective. Raises: as ``together``."""
    return together(directory, lambda: work() if accelerator.is_main_process else None)[0]


def together(directory: str, work: Callable[[], Any]) -> list[Any]:
    """Do ``work`` on every rank, and return the results of all ranks. Collective.

    An error on any rank is raised on all. Raises: what ``work`` raises; LevelUnavailable, if another rank failed.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised below, when all ranks know
        failure = error
    results = gather_object([(result, failure and f"{type(failure).__name__}: {failure}")])
    if failure is not None:
        raise failure
    others = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(results) if text is not None]
    if others:
        raise LevelUnavailable(f"{directory!r}: {'; '.join(others)}")
    return [result for result, _ in results]
