"""Names that were given to snapshots: an object beside the manifests for each, its content the run that gave it."""

from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.storage import Storage
from lazysnap.shard.manifest import parse_keep_file_name


def names_in(storage: Storage, directory: str, files: list[str], problems: list[str]) -> list[tuple[str, str]]:
    """Each name among ``files`` and the run that gave it: one that was left behind names no other run's snapshot.

    Blocks. What cannot be read is added to ``problems``.
    """
    found = []
    for file in files:
        name = parse_keep_file_name(file)
        if name is None:
            continue
        try:
            found.append((name, storage.get(f"{directory}/{file}").decode("ascii", "replace").strip()))
        except FileNotFoundError:
            continue  # taken away just now
        except (FormatError, LevelError) as error:
            problems.append(str(error))
    return found
