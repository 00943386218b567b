"""A snapshot as a directory of ``torch.distributed.checkpoint``, written by its own writer."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from lazysnap.errors import StateError
from lazysnap.exports.checkpoint import stock_state
from lazysnap.exports.job import ExportJob
from lazysnap.snapshots.assembly import WholeSnapshot


def write_distributed(whole: WholeSnapshot, job: ExportJob, path: str) -> list[str]:
    """Write a new directory; return notes for the user. No process group is needed.

    Optimizers are in the form of ``get_state_dict`` where the snapshot has the names of their parameters.
    Blocks. Raises: OSError; StateError, if two values get one name (DCP joins keys with points); FormatError;
    LevelError.
    """
    state, notes = stock_state(whole, job, path)
    for place, names in (whole.meta.parameters or {}).items():
        state = _named(state, place, names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no process group
            save(state, checkpoint_id=path, no_dist=True)
    except ValueError as error:
        raise StateError(f"torch.distributed.checkpoint cannot hold this state: {error}") from error
    except CheckpointException as error:
        cause = next((failure for failure, _ in error.failures.values()), error)
        if isinstance(cause, (OSError, KeyboardInterrupt)):
            raise cause from None
        raise OSError(f"{path}: torch.distributed.checkpoint failed: {error}") from error
    return notes


def _named(value: Any, place: str, names: Sequence[str]) -> Any:
    """Return a state in which the optimizer at ``place`` has names of parameters instead of numbers."""
    if not place:
        return _by_name(value, names)

    def named(key: object, item: Any) -> Any:
        if place == str(key) or place.startswith(f"{key}."):
            return _named(item, place[len(str(key)) + 1 :], names)
        return item

    if isinstance(value, dict):
        return {key: named(key, item) for key, item in value.items()}
    return [named(number, item) for number, item in enumerate(value)] if isinstance(value, list) else value


def _by_name(value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, dict) or len(set(names)) < len(names):
        return value
    state = value.get("state")
    groups = value.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return value
    numbers = [*state, *(number for group in groups for number in group["params"])]
    if not all(type(number) is int and 0 <= number < len(names) for number in numbers):
        return value
    return {
        **value,
        "state": {names[number]: item for number, item in state.items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }
