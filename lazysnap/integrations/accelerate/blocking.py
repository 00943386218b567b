"""Stock ``save_state``, where no level stores a snapshot that a copy could be made from: blocking, but atomic."""

import contextlib
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from lazysnap.errors import LevelUnavailable
from lazysnap.exports.folder import in_place_when_whole


def save_blocking(accelerator: Accelerator, directory: str, save: Callable[[str], Any]) -> None:
    """``save`` to a directory beside ``directory``, which then gets that name: it is complete or not there.

    ``save``: stock ``save_state``, called with a directory on every rank. All ranks see the same file system.
    Collective. Blocks. Raises: on every rank, what one of them met: of its own what ``save`` raised or OSError, of
    another LevelUnavailable; then ``directory`` is as it was.
    """
    with contextlib.ExitStack() as main:
        place = in_place_when_whole(directory, {"layout": "accelerate"})
        temp = by_main(accelerator, directory, lambda: main.enter_context(place))
        project = accelerator.project_configuration

        def write() -> None:
            naming, iteration = project.automatic_checkpoint_naming, project.iteration
            project.automatic_checkpoint_naming = False  # else stock would choose another place
            try:
                save(temp)
            finally:
                project.automatic_checkpoint_naming, project.iteration = naming, iteration

        together(directory, write)
        by_main(accelerator, directory, main.close)


def by_main(accelerator: Accelerator, directory: str, work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns on the main process. Collective. Raises: as ``save_blocking``."""
    return together(directory, lambda: work() if accelerator.is_main_process else None)[0]


def together(directory: str, work: Callable[[], Any]) -> list[Any]:
    """Do ``work`` on every rank; what it returned on each. Collective.

    Raises: on every rank, what one of them met, as ``save_blocking``.
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
