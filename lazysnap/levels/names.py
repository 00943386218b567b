"""Names that were given to snapshots: an object beside the manifests for each, its content the id of the run."""

from lazysnap.errors import FormatError
from lazysnap.levels.storage import Storage
from lazysnap.shard.limits import MAX_SMALL_OBJECT_BYTES
from lazysnap.shard.names import is_id


def is_given_by_a_run(storage: Storage, path: str) -> bool:
    """Whether a run wrote a ``keep-…`` object, as its content tells. Blocks. Raises: LevelError."""
    try:
        return storage.size(path) <= MAX_SMALL_OBJECT_BYTES and is_id(storage.get(path).decode("ascii").strip())
    except (FileNotFoundError, FormatError, UnicodeDecodeError):
        return False
