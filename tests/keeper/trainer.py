"""A trainer without torch, driven line by line: a JSON command on standard input, a JSON answer on standard output.

usage: trainer.py JOB_ID CONFIG_JSON     (CONFIG_JSON: levels, linger_s, max_bytes, rank: number and of how many, start,
which ranks of one training have in common, floor: the greatest number of a capture before it, and elsewhere: whether
all of them are on the second of two nodes)
"""

import json
import os
import signal
import sys
import threading
import time

import msgspec

from lazysnap.config import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.link import cut
from lazysnap.keeper.protocol import Leave, Run, SlotsChanged, Store
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.links.secret import Secret
from lazysnap.memory.arena import SlotPhase, Word
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.names import new_id
from lazysnap.topology import Team

TIMEOUT_S = 60.0
# A shell starts what runs in the background with this signal ignored, and so all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def content(run_id, step, size_bytes):
    """The image that a capture of this step has: known to the tests as well."""
    layout = Layout.plan([TensorSpec("x", "U8", (size_bytes,))])
    return layout.header + bytes([step % 251 ^ int(run_id[:2], 16)]) * size_bytes


class Trainer:
    def __init__(self, job_id, settings):
        levels = tuple(PersistentLevel(**level) for level in settings.get("levels", ()))
        memory = MemoryLevel(linger_s=settings.get("linger_s", 30.0), max_bytes=settings.get("max_bytes"))
        config = SnapshotConfig(job_id=job_id, levels=levels, memory=memory, io_timeout_s=TIMEOUT_S)
        self.timeout_s = settings.get("timeout_s", TIMEOUT_S)
        rank, ranks = self.rank = settings.get("rank", (0, 1))
        team = Team(rank, ranks, rank, node_ranks=tuple(range(ranks)))
        if settings.get("elsewhere"):
            team = Team(ranks + rank, 2 * ranks, rank, 1, 2, node_ranks=tuple(range(ranks, 2 * ranks)))
        self.client = KeeperClient(JobIdentity.from_config(config), config, team)
        self.floor = settings.get("floor", 0)
        self.size = settings.get("size", 100_000)
        self.run_id = settings.get("run_id", "ab" * 8)
        self.events = []
        self.open = self.newest = self.started = None
        self.start_id = settings.get("start") or new_id()
        self.kept = settings.get("kept", 1)

    def connect(self):
        started = time.monotonic()
        self.client.connect(TIMEOUT_S)
        return time.monotonic() - started

    def start(self):
        self.client.start()
        return True

    def join_populating(self):
        """Wait for the threads that put pages in place."""
        for thread in threading.enumerate():
            if thread.name == "lazysnap-populate":
                thread.join(TIMEOUT_S)
        return True

    def inventory(self):
        found = []
        for entry in self.client.inventory(self.timeout_s).entries:
            size = entry.slot.status().image_bytes
            image = entry.slot.image[:size]
            if entry.checksums is not None:
                MemoryBlocks(image, entry.checksums, "a slot").verify(size)
            whole = bytes(image) == content(entry.run_id, entry.step, size - 4096)
            found.append([entry.step, entry.run_id, whole, entry.checksums is not None])
        return sorted(found)

    def reserve(self, count, size=None):
        self.size = size or self.size
        self.client.reserve((4096, 4096 + self.size), count)
        deadline = time.monotonic() + TIMEOUT_S
        self.return_others()
        while len(self.fitting()) < count and time.monotonic() < deadline and not self.refused():
            time.sleep(0.002)
            self.return_others()
        return len(self.fitting())

    def fits(self, slot):
        return slot.image_capacity == -(-(4096 + self.size) // 4096) * 4096

    def fitting(self):
        return [slot for slot in self.client.slots() if self.fits(slot)]

    def return_others(self):
        """Return slots of another size, but for what the newest whole captures and levels need."""
        statuses = {slot: slot.status() for slot in self.client.mapped()}
        whole = [status.sequence for status in statuses.values() if status.phase is SlotPhase.WHOLE]
        for slot, status in statuses.items():
            is_needed = status.pinned or status.phase is SlotPhase.CAPTURING
            if not self.fits(slot) and not is_needed and status.sequence not in sorted(whole)[-self.kept :]:
                self.client.return_slot(slot)
        return True

    def return_all(self):
        """Return every slot, those of the wanted size, too."""
        for slot in self.client.mapped():
            self.client.return_slot(slot)
        return len(self.client.slots())

    def refused(self):
        self.events += self.client.poll_events()
        return [event.text for event in self.events if type(event).__name__ == "MemoryRefused"]

    def begin(self, step, must=False):
        """``must``: whether it has to be stored, also if it is not due."""
        if self.started is None:
            self._begin_run()
        slots = self.fitting()
        whole = [slot for slot in slots if slot.status().phase is SlotPhase.WHOLE]
        newest = max(whole, key=lambda slot: slot.word(Word.SEQUENCE), default=None)
        slot = next(slot for slot in slots if slot is not newest and not slot.status().pinned)
        sequence = 1 + max(other.word(Word.SEQUENCE) for other in self.client.slots())
        meta = CaptureMeta(self.run_id, self.started, step, *self.rank, 0).to_bytes()
        image = content(self.run_id, step, self.size)
        slot.begin(step, sequence=sequence, image_bytes=len(image), meta=meta, pin=slot.is_granted(step))
        if slot.status().pinned and not slot.is_granted(step):
            slot.unpin()
        if must:
            slot.pin(step, until_stored=True)
            self.client.tell(Store(step))
        self.client.tell(SlotsChanged())
        slot.image[: len(image) // 2] = image[: len(image) // 2]
        slot.advance(len(image) // 2)
        self.open = slot, image, step
        return True

    def commit(self):
        slot, image, self.newest = self.open
        slot.image[: len(image)] = image
        slot.commit()
        return self.return_others()

    def discard(self):
        self.open[0].discard()
        return True

    def capture(self, step, must=False):
        return self.begin(step, must) and self.commit()

    def pinned(self):
        return sum(slot.status().pinned for slot in self.client.slots())

    def phases(self):
        return sorted(slot.status().phase.value for slot in self.client.slots())

    def slots(self):
        return len(self.client.slots())

    def inodes(self):
        return len({os.fstat(slot.fd).st_ino for slot in self.client.slots()})

    def num_unsent(self):
        """Notes that the keeper has not taken yet."""
        return len(self.client._connection.waiting)

    def adopt_run(self, run_id):
        self.run_id, self.start_id = run_id, new_id()
        return self._begin_run()

    def _begin_run(self):
        self.started = self.start_id
        self.client.adopt_run(
            Run(
                self.run_id,
                self.started,
                step=0,
                floor=self.floor,
                every_n_steps=1,
                num_kept=self.kept,
                stored={},
                shared=[],
                peers=None,
                is_new=True,
            )
        )
        return True

    def serve_peers(self, secret):
        """The port at which the keeper lets others read."""
        port = self.client.reserve_port("127.0.0.1")
        assert self.client.serve_peers("127.0.0.1", Secret(**secret), TIMEOUT_S)
        return port

    def wait_durable(self, step, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not (is_durable := self.client.is_durable(step)) and time.monotonic() < deadline:
            time.sleep(0.005)
        return is_durable

    def drain(self, timeout_s=TIMEOUT_S):
        return self.client.drain(self.newest, timeout_s)

    def take_events(self):
        self.events += self.client.poll_events()
        events, self.events = self.events, []
        return [[type(event).__name__, msgspec.to_builtins(event)] for event in events]

    def cut(self):
        """Break the connection as a trainer does that finds the keeper hanging."""
        cut(self.client._connection)
        return True

    def disconnect(self):
        """Lose the connection for good, without a word."""
        self.client._goodbye = Leave("left")
        return self.cut()

    def fork(self):
        """A child like a data loader's worker, that outlives its parent."""
        pid = os.fork()
        if pid == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        return pid

    def goodbye(self):
        self.client.goodbye(TIMEOUT_S)
        return True

    def abandon(self):
        self.client.abandon()
        return True


def main():
    trainer = Trainer(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = getattr(trainer, name)(**arguments)
        except Exception as error:  # noqa: BLE001  told to the test, which judges it
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
