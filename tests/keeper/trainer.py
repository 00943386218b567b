"""A trainer without torch, driven line by line: a JSON command on standard input, a JSON answer on standard output.

usage: trainer.py JOB_ID SETTINGS_JSON     (levels: arguments of LevelSettings; linger_s, max_bytes; rank: number and of
how many; start, which ranks of one training have in common; kept: K; run_id, size; elsewhere: all ranks are on the
second of two nodes)
"""

import json
import os
import signal
import sys
import threading
import time

from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import Farewell, JobSettings, LevelSettings, MemoryWish, PeerAddress, PeerSettings
from lazysnap.errors import LazySnapError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.memory.slot_choice import SlotPhase, choose_slot, surplus_slots
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.names import new_id

TIMEOUT_S = 60.0
META_BYTES = 4096
# A shell starts what runs in the background with this signal ignored, and so all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def content(run_id, step, size_bytes):
    """The image that a capture of this step has: known to the tests as well."""
    layout = Layout.plan([TensorSpec("x", "U8", (size_bytes,))])
    return layout.header + bytes([step % 251 ^ int(run_id[:2], 16)]) * size_bytes


class Trainer:
    def __init__(self, job_id, settings):
        identity = JobIdentity.from_config(SnapshotConfig(job_id=job_id))
        self.rank, self.num_ranks = settings.get("rank", (0, 1))
        self.client = KeeperClient(identity, self.rank, linger_s=settings.get("linger_s", 30.0), io_timeout_s=TIMEOUT_S)
        self.levels = tuple(LevelSettings(**level) for level in settings.get("levels", ()))
        self.max_bytes = settings.get("max_bytes")
        self.is_elsewhere = settings.get("elsewhere", False)
        self.size = settings.get("size", 100_000)
        self.run_id = settings.get("run_id", "ab" * 8)
        self.start_id = settings.get("start") or new_id()
        self.kept = settings.get("kept", 1)
        self.timeout_s = settings.get("timeout_s", TIMEOUT_S)
        self.is_begun = False
        self.open = None
        self.newest = None
        self.count = 0

    def connect(self):
        began_at = time.monotonic()
        self.client.connect(TIMEOUT_S)
        return time.monotonic() - began_at

    def start(self):
        self.client.start()
        return True

    def is_connected(self):
        return self.client.is_connected

    def join_populating(self):
        """Wait for the threads that put pages in place."""
        for thread in threading.enumerate():
            if thread.name == "lazysnap-populate":
                thread.join(TIMEOUT_S)
        return True

    def inventory(self):
        found = []
        for entry in self.client.memory(self.timeout_s).entries:
            size = entry.slot.view().image_bytes
            image = entry.slot.read(0, size)
            if entry.checksums is not None:
                MemoryBlocks(image, entry.checksums, "a slot").view(0, size)
            whole = bytes(image) == content(entry.run_id, entry.step, size - 4096)
            found.append([entry.step, entry.run_id, whole, entry.checksums is not None])
        return sorted(found)

    def wish(self):
        """Wish for the slots that captures need, and let those of another size live where there are none."""
        wish = MemoryWish(self.count, META_BYTES, 4096 + self.size, max_bytes=self.max_bytes)
        self.client.ask_memory(wish)
        return True

    def reserve(self, count, size=None):
        self.size = size or self.size
        self.count = count
        self.wish()
        deadline = time.monotonic() + TIMEOUT_S
        self.return_others()
        while len(self.fitting()) < count and time.monotonic() < deadline and not self.refused():
            time.sleep(0.002)
            self.return_others()
        return len(self.fitting())

    def fits(self, slot):
        return slot.image_capacity_bytes == -(-(4096 + self.size) // 4096) * 4096

    def fitting(self):
        return [slot for slot in self.client.slots() if self.fits(slot)]

    def return_others(self):
        """Return slots of another size that nothing needs any more."""
        mapped = {slot.slot_id: slot for slot in self.client.mapped()}
        views = [slot.view() for slot in mapped.values()]
        fitting = [slot_id for slot_id, slot in mapped.items() if self.fits(slot)]
        for view in surplus_slots(views, self.kept, fitting=fitting, count=len(fitting)):
            self.client.return_slot(mapped[view.slot_id])
        return True

    def return_all(self):
        """Return every slot, those of the wanted size, too."""
        for slot in self.client.mapped():
            self.client.return_slot(slot)
        return len(self.client.slots())

    def refused(self):
        return self.client.state.memory_refusal

    def alerts(self):
        return [[alert.about, alert.text] for alert in self.client.state.alerts]

    def failures(self):
        return [[level.failed_step, level.failure] for level in self.client.state.levels]

    def begin(self, step, must=False):
        """``must``: whether it has to be stored, also if it is not due."""
        if not self.is_begun:
            self.begin_start()
        image = content(self.run_id, step, self.size)
        slots = {slot.slot_id: slot for slot in self.fitting()}
        views = [slot.view() for slot in self.client.slots()]
        mine = [view for view in views if view.slot_id in slots]
        chosen = choose_slot(mine, self.kept, image_bytes=len(image), meta_bytes=META_BYTES)
        slot = slots[chosen.slot_id]
        meta = CaptureMeta(
            self.run_id, self.start_id, step, self._global_rank(), self._world_size(), time.time_ns()
        ).to_bytes()
        sequence = self.client.next_sequence()
        slot.begin(int(self.start_id, 16), step, sequence=sequence, image_bytes=len(image), meta=meta)
        if must:
            self.client.require(step)
        self.client.wake(step)
        slot.image[: len(image) // 2] = image[: len(image) // 2]
        slot.advance(len(image) // 2)
        self.open = slot, image, step, sequence
        return True

    def commit(self):
        slot, image, self.newest, _ = self.open
        slot.image[: len(image)] = image
        slot.commit(copied_ns=1)
        return self.return_others()

    def discard(self):
        return self.open[0].discard(self.open[3])

    def capture(self, step, must=False):
        return self.begin(step, must) and self.commit()

    def held(self):
        return sum(slot.view().is_held for slot in self.client.slots())

    def phases(self):
        return sorted(slot.view().phase.value for slot in self.client.slots())

    def num_whole(self):
        return sum(slot.view().phase is SlotPhase.WHOLE for slot in self.client.slots())

    def slots(self):
        return len(self.client.slots())

    def inodes(self):
        return len({os.fstat(slot.descriptor).st_ino for slot in self.client.slots()})

    def begin_start(self, run_id=None, start=None, step=-1):
        self.run_id = run_id or self.run_id
        self.start_id = start or (new_id() if self.is_begun else self.start_id)
        self.is_begun = True
        job = JobSettings(
            run=self.run_id,
            levels=self.levels,
            num_kept=self.kept,
            ranks=tuple(range(self._global_rank() - self.rank, self._global_rank() - self.rank + self.num_ranks)),
            world_size=self._world_size(),
            node=int(self.is_elsewhere),
            num_nodes=1 + self.is_elsewhere,
        )
        had_slots = bool(self.client.slots())
        self.client.begin_start(job, int(self.start_id, 16), step)
        # There are no slots before the keeper was told of this start.
        deadline = time.monotonic() + TIMEOUT_S
        while had_slots and not self.client.slots() and time.monotonic() < deadline:
            time.sleep(0.002)
        return True

    def _global_rank(self):
        return self.rank + self.num_ranks * self.is_elsewhere

    def _world_size(self):
        return self.num_ranks * (1 + self.is_elsewhere)

    def serve_peers(self, secret):
        """Return the port at which the keeper lets others read."""
        port = self.client.reserve_port("127.0.0.1")
        address = PeerAddress("127.0.0.1", port)
        self.client.set_peers(PeerSettings("a job", 0, secret, (address,)))

        def is_serving(state):
            return state.serves_at == address

        assert self.client.wait(is_serving, TIMEOUT_S)
        return port

    def wait_durable(self, step, timeout_s):
        return self.client.wait(lambda _: self.client.is_complete(step, 0), timeout_s)

    def store(self, timeout_s=TIMEOUT_S):
        """Have the newest capture stored at every level."""
        self.client.require(self.newest)

        def is_stored(_):
            return all(self.client.is_complete(self.newest, level) for level in range(len(self.levels)))

        return self.client.wait(is_stored, timeout_s)

    def why_not(self):
        """What is in the way of captures."""
        state = self.client.state
        return f"connected: {self.client.is_connected}; {self.client.error}; {state}; {self.client.mapped()}"

    def cut(self):
        """Break the connection, and wait until that is seen."""
        channel = self.client._link._channel
        channel._socket.shutdown(2)
        return self.client.wait(lambda _: self.client._link._channel is not channel, TIMEOUT_S)

    def disconnect(self):
        """Lose the connection for good, without a word."""
        self.client._link._leave_by_s = 0.0
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
        self.client.leave(Farewell.OVER, TIMEOUT_S)
        return True

    def abandon(self):
        self.client.leave(Farewell.LEFT, 0.0)
        return True


def main():
    trainer = Trainer(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = getattr(trainer, name)(**arguments)
        except LazySnapError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
