"""Names that were given to snapshots: an object beside the manifests for each, its content the run that gave it."""

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.storage import Storage
from lazysnap.shard.manifest import is_run_id, parse_keep_file_name


def names_in(storage: Storage, directory: str, files: list[str], problems: list[str]) -> list[tuple[str, str | None]]:
    """Each name among ``files`` and the run that gave it: one that was left behind names no other run's snapshot.

    ``None``, where the object does not tell: a damaged name protects whatever is there. What cannot be read is added
    to ``problems``. Blocks.
    """
    found: list[tuple[str, str | None]] = []
    for file in files:
        name = parse_keep_file_name(file)
        if name is None:
            continue
        try:
            text = storage.get(f"{directory}/{file}").decode("ascii", "replace").strip()
            found.append((name, text if is_run_id(text) else None))
        except FileNotFoundError:
            continue  # taken away just now
        except (FormatError, LevelError) as error:
            problems.append(str(error))
    return found
