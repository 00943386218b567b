"""A snapshot as a directory of ``torch.distributed.checkpoint``, written by its own writer."""

import warnings
from collections.abc import Iterable, Sequence
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
    for path_in_state, names in (whole.meta.parameters or {}).items():
        state = _named(state, path_in_state, names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no process group
            save(state, checkpoint_id=path, no_dist=True)
    except ValueError as error:
        raise StateError(f"torch.distributed.checkpoint cannot hold this state: {error}") from error
    except CheckpointException as error:
        first_failure = next(iter(error.failures.values()), None)
        if first_failure is not None:
            cause, _ = first_failure
            if isinstance(cause, (OSError, KeyboardInterrupt)):
                raise cause from None
        raise OSError(f"{path}: torch.distributed.checkpoint failed: {error}") from error
    return notes


def _named(value: Any, path: str, names: Sequence[str]) -> Any:
    """Return a state in which the optimizer at ``path`` has names of parameters instead of numbers."""
    if not path:
        return _by_name(value, names)

    changed: Any
    keys: Iterable[Any]
    if isinstance(value, dict):
        changed = dict(value)
        keys = list(value)
    elif isinstance(value, list):
        changed = list(value)
        keys = range(len(value))
    else:
        return value
    for key in keys:
        if path == str(key) or path.startswith(f"{key}."):
            changed[key] = _named(changed[key], path[len(str(key)) + 1 :], names)
    return changed


def _by_name(value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, dict) or len(set(names)) < len(names):
        return value
    state = value.get("state")
    groups = value.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return value
    numbers = list(state)
    for group in groups:
        numbers += group["params"]
    if not all(type(number) is int and 0 <= number < len(names) for number in numbers):
        return value
    named_groups = []
    for group in groups:
        named_groups.append({**group, "params": [names[number] for number in group["params"]]})
    named_state = {names[number]: item for number, item in state.items()}
    return {**value, "state": named_state, "param_groups": named_groups}
