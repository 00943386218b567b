"""The only program of the guest: calls come in as JSON lines, each runs in a thread, answers go out as JSON lines.

No torch here: one slow processor.
"""

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import traceback

sys.path.extend(str(above) for above in pathlib.Path(__file__).parents[1:3])

from support.catalogue import inventory_of
from support.image import Image, write_shard

from lazysnap.levels import leftovers
from lazysnap.levels.blocks import read_node_file
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.store import open_storage
from lazysnap.levels.watchdog import Watchdog
from lazysnap.levels.watched import WatchedStorage
from lazysnap.shard.manifest import CaptureMeta

RUN = "0" * 16
_output = threading.Lock()


def say(message: dict) -> None:
    with _output:
        sys.stdout.write(f"@@{json.dumps(message)}\n")
        sys.stdout.flush()


class Conversation:
    """One call: it can stop, to be told to go on."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.goes: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def stop(self, where: str) -> None:
        say({"id": self.number, "stopped": where})
        self.goes.get()

    def run(self, function, arguments) -> None:
        try:
            say({"id": self.number, "result": function(self, *arguments)})
        except BaseException as error:  # noqa: BLE001  the host decides what it means
            text = str(error)
            if not isinstance(error, Exception) or type(error).__module__ == "builtins":
                text += "\n" + traceback.format_exc()[-600:]
            say({"id": self.number, "error": [type(error).__name__, text]})


# ------------------------------------------------------------------------------------------- what can be called


def sh(talk: Conversation, command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def mount(talk: Conversation, name: str, export: str, options: str) -> None:
    path = f"/mnt/{name}"
    os.makedirs(path, exist_ok=True)
    sh(talk, f"mount.nfs4 -o vers=4.2,proto=tcp,{options} 10.77.0.1:/{export} {path}")


class StopsInTheMiddle(Image):
    """Stops after the first of its blocks."""

    def __init__(self, talk: Conversation, step: int, size: int) -> None:
        super().__init__(step, size)
        self.talk = talk
        self.views = 0

    def view(self, offset: int, length: int) -> memoryview:
        self.views += 1
        if self.views == 2:
            self.talk.stop("middle")
        return super().view(offset, length)


_stores: dict = {}


def _store(url: str):
    """One store for each place, as in a keeper: what it keeps must not be trusted after an error."""
    return _stores.setdefault(url, open_storage(url))


START = "1" * 16


def _meta(step: int) -> CaptureMeta:
    return CaptureMeta(RUN, START, step, 0, 1, 3, state={"step": step})


def write(talk: Conversation, url: str, step: int, size: int = 5000) -> None:
    write_shard(_store(url), _meta(step), Image(step, size))


def write_slowly(talk: Conversation, url: str, step: int, size: int) -> None:
    write_shard(_store(url), _meta(step), StopsInTheMiddle(talk, step, size))


def write_with_deadline(talk: Conversation, url: str, step: int, size: int, deadline_s: float) -> str:
    """What the attempt raised; then, after a stop, what became of the one that was left behind."""
    source = StopsInTheMiddle(talk, step, size)

    name = f"step {step}"
    attempt = Watchdog(
        lambda beat: write_shard(WatchedStorage(_store(url), beat), _meta(step), source), name, deadline_s
    )
    try:
        attempt.result()
    except Exception as error:  # noqa: BLE001
        talk.stop(type(error).__name__)
    attempt.wait(30)
    try:
        attempt.result()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "committed"


def restorable(talk: Conversation, url: str) -> list:
    """Steps of which every block was read and verified; problems."""
    store = _store(url)
    inventory = inventory_of(store)
    steps = []
    for entry in inventory.entries:
        _read(store, entry)
        steps.append(entry.step)
    return [sorted(steps), list(inventory.problems)]


def _read(store, entry) -> None:
    manifest, place, last = FilePlace.of(store, entry).read_manifest(), FilePlace.of(store, entry), map_anonymous(1)
    read_node_file(place, manifest)
    with contextlib.closing(store.reader(place.file_path)) as reader:
        reader.read_into(manifest.size_bytes - 1, last)
    assert last[0] == entry.step % 256


def inventory(talk: Conversation, url: str) -> list:
    found = inventory_of(_store(url))
    return [[entry.step for entry in found.entries], list(found.problems)]


def read_slowly(talk: Conversation, url: str, path: str, size: int) -> int:
    """Reads a file in two halves, with a stop between; nothing from the page cache. Returns the last byte."""
    storage = _store(url)
    with contextlib.closing(storage.reader(path)) as reader:
        half = size // 2 // 4096 * 4096
        out = map_anonymous(size)
        reader.read_into(0, out[:half])
        talk.stop("middle")
        reader.read_into(half, out[half:])
        return out[-1]


def contend(talk: Conversation, url: str, content: str, rounds: int) -> None:
    storage = _store(url)
    writers = [storage.create(f"{number}/shard", len(content)) for number in range(rounds)]
    for writer in writers:
        writer.write(0, memoryview(content.encode()))
    talk.stop("begun")
    for writer in writers:
        writer.publish()
        writer.close()


def publish_only(talk: Conversation, url: str, path: str, size: int) -> None:
    """Publishes a shard that is never committed; whole pages go past the client's cache."""
    with contextlib.closing(_store(url).create(path, size)) as writer:
        writer.write(0, map_anonymous(-(-size // 4096) * 4096)[:size])
        talk.stop("written")
        writer.publish()
        talk.stop("published")


def die_with_a_file(talk: Conversation, url: str, path: str) -> None:
    _die(talk, lambda: _store(url).create(path, 100))


def _die(talk: Conversation, hold) -> None:
    """A process of its own that holds something, until SIGKILL."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            held = hold()
            os.write(write_end, b"held")
            signal.pause()
            del held
        os._exit(1)
    os.close(write_end)
    try:
        assert os.read(read_end, 4) == b"held"
        talk.stop("held")
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def sweep(talk: Conversation, url: str) -> list:
    return leftovers.sweep(_store(url))


def storage(talk: Conversation, url: str, method: str, *arguments):
    """A method of the storage whose answer is plain."""
    return getattr(_store(url), method)(*arguments)


def main() -> None:
    talks: dict = {}
    say({"id": -1, "result": "up"})
    for line in sys.stdin:
        message = json.loads(line)
        number = message["id"]
        if "go" in message:
            talks[number].goes.put(True)
            continue
        talk = talks[number] = Conversation(number)
        function = globals()[message["call"]]
        threading.Thread(target=talk.run, args=(function, message["arguments"]), daemon=True).start()


main()
