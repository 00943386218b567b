"""Another process at a local level: python local_child.py COMMAND ROOT [ARGUMENT...]; talks in lines.

Answers with ``ready`` where it stops, and goes on with the next line of its input. ``refuse=CALL:ERROR`` among the
arguments makes the kernel refuse a system call; ``uid=N`` gives up root.
"""

import os
import sys

from refused_calls import refuse
from snapshots import Image, meta
from support.image import write_shard

from lazysnap.errors import LevelError
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.storage import probe_name
from lazysnap.levels.store import open_storage

NAME = "step-00000001/shard"


def say(*words: object) -> None:
    print(*words, flush=True)


def stop() -> None:
    say("ready")
    sys.stdin.readline()


def contend(storage: LocalStorage, content: str, rounds: str) -> None:
    """Publish ``rounds`` names, all begun beforehand."""
    writers = [storage.create(f"{number}/shard", len(content)) for number in range(int(rounds))]
    for writer in writers:
        writer.write(0, memoryview(content.encode()))
    stop()
    for writer in writers:
        writer.publish()
        writer.close()
    say("done")


def publish_twice(storage: LocalStorage) -> None:
    writer = storage.create(NAME, 4)
    writer.write(0, memoryview(b"mine"))
    for _ in range(2):
        try:
            writer.publish()
            say("published")
        except LevelError as error:
            say(error)
    writer.close()


def snapshots(storage: LocalStorage) -> None:
    """Writes steps 1, 2, 3, ...; stops after each."""
    store = open_storage(storage.url)
    step = 0
    while True:
        step += 1
        try:
            write_shard(store, meta(step), Image(step))
            say("committed", step)
        except LevelError as error:
            say(type(error).__name__, error)
        if not sys.stdin.readline():
            return


def blocks(storage: LocalStorage) -> None:
    """How much of a file is allocated before anything is written."""
    writer = storage.create(NAME, 1 << 20)
    (temporary,) = os.listdir(os.path.join(storage.url, "step-00000001"))
    say(os.stat(os.path.join(storage.url, "step-00000001", temporary)).st_blocks)
    writer.close()


def small(storage: LocalStorage) -> None:
    """Write a small object directly at the level, as a probe does."""
    storage.put(probe_name(), b"probe")
    say("written")


if __name__ == "__main__":
    command, root, *arguments = sys.argv[1:]
    for argument in list(arguments):
        key, _, value = argument.partition("=")
        if key == "refuse":
            refuse(*value.split(":"))
        elif key == "uid":
            os.setgroups([])
            os.setgid(int(value))
            os.setuid(int(value))
        else:
            continue
        arguments.remove(argument)
    globals()[command](LocalStorage(root), *arguments)
