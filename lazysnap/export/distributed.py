"""A snapshot as a directory of ``torch.distributed.checkpoint``."""

import warnings
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from lazysnap.errors import UnsupportedState
from lazysnap.export.checkpoint import as_others_know_it


def write_distributed(state: dict[str, Any], path: str) -> None:
    """Write a new directory; no process group is needed.

    Blocks. Raises: OSError; UnsupportedState, if two values get one name (DCP joins keys with points).
    """
    try:
        with warnings.catch_warnings():
            # It says that there is no process group: that is how it is meant.
            warnings.simplefilter("ignore")
            save(as_others_know_it(state), checkpoint_id=path, no_dist=True)
    except ValueError as error:
        raise UnsupportedState(f"torch.distributed.checkpoint cannot hold this state: {error}") from error
    except CheckpointException as error:
        raise OSError(f"{path}: torch.distributed.checkpoint failed: {error}") from error
