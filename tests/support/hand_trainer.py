"""A trainer by hand: the messages of one, over a channel, without an engine.

``python -m support.hand_trainer JOB_ID STEP...`` captures these steps and waits to be killed.
"""

import contextlib
import os
import sys
import time

from msgspec import structs

from lazysnap.core.messages import JobSettings, KeeperState, MemoryWish, TrainerState
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import KeeperBusy, start_keeper, try_connect
from lazysnap.keeper.questions import Answer, Question
from lazysnap.memory.slot_choice import choose_slot
from lazysnap.memory.slots import TrainerSlot
from lazysnap.memory.words import NodePage
from lazysnap.shard.manifest import CaptureMeta
from support.image import Image
from support.waiting import TIMEOUT_S, until

IMAGE_BYTES = 1 << 16
RUN = "00000000000000aa"
WISH = MemoryWish(num_slots=2, meta_bytes=4096, image_bytes=IMAGE_BYTES)
JOB = JobSettings(run=RUN, levels=())


def identity_of(job_id, node=0):
    """The identity of a job on a node; all nodes are on this machine."""
    return JobIdentity(job_id, os.getuid(), f"node-{node}")


class HandTrainer:
    """One end of a connection to the keeper of a job, which it starts if there is none."""

    def __init__(self, job_id, handed_over=(), node=0, **fields):
        self.state = TrainerState(0, **fields)
        self.keeper = KeeperState()
        self.answers = []
        self.descriptors = []
        self.slots = {}
        self.page = None
        self.is_over = False
        identity = identity_of(job_id, node)
        self.channel = None
        until(lambda: self._connect(identity, handed_over))

    def _connect(self, identity, descriptors):
        """Connect to the keeper, or start it; False while another process has the lock, and is dying."""
        self.channel = try_connect(identity)
        if self.channel is not None:
            self.channel.send(self.state, descriptors)
            return True
        with contextlib.suppress(KeeperBusy):
            self.channel = start_keeper(identity, self.state, descriptors).channel
        return self.channel is not None

    def change(self, **fields):
        self.state = structs.replace(self.state, **fields)
        self.channel.send(self.state)

    def until_state(self, is_true, timeout_s=TIMEOUT_S):
        """Wait for a state of the keeper, and return it."""
        deadline = time.monotonic() + timeout_s
        while not is_true(self.keeper):
            assert time.monotonic() < deadline, self.keeper
            assert not self.is_over, self.keeper
            self.read(timeout_s=0.1)
        return self.keeper

    def ask(self, **fields):
        """Ask a question. Returns: the answer, and its descriptors."""
        self.channel.send(Question(**fields))
        deadline = time.monotonic() + TIMEOUT_S
        while not self.answers:
            assert time.monotonic() < deadline
            self.read(timeout_s=0.1)
        return self.answers.pop()

    def until_over(self):
        """Wait until the keeper closed the connection."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.is_over:
            assert time.monotonic() < deadline
            self.read(timeout_s=0.1)

    def read(self, timeout_s=0.0):
        self.channel.wait(timeout_s)
        frames = self.channel.receive()
        if frames is None:
            self.is_over = True
            return
        for frame in frames:
            if isinstance(frame.message, Answer):
                self.answers.append((frame.message, frame.descriptors))
            else:
                self._take_state(frame.message, list(frame.descriptors))

    def _take_state(self, state, descriptors):
        self.keeper = state
        if descriptors and self.page is None:
            self.page = NodePage.attach(descriptors.pop(0), descriptors.pop(0))
        for descriptor in descriptors:
            slot = TrainerSlot.attach(descriptor)
            self.slots[slot.slot_id] = slot

    def capture_free(self, step):
        """Capture a step into the slot that a trainer chooses, if there is one."""
        views = [slot.view() for slot in self.slots.values()]
        chosen = choose_slot(views, self.state.job.num_kept, image_bytes=IMAGE_BYTES, meta_bytes=4096)
        if chosen is not None:
            self.capture(step, self.slots[chosen.slot_id])

    def capture(self, step, slot=None, *, is_whole=True):
        """Capture a step into a slot: the one with the oldest capture."""
        slot = slot or min(self.slots.values(), key=lambda slot: slot.view().sequence)
        sequence = 1 + max(view.view().sequence for view in self.slots.values())
        meta = meta_of(self.state, step)
        shard = Image(step)
        slot.begin(self.state.start, step, sequence=sequence, image_bytes=shard.size_bytes, meta=meta)
        slot.image[: shard.size_bytes] = shard.view(0, shard.size_bytes)[: shard.size_bytes]
        slot.advance(shard.size_bytes)
        if is_whole:
            slot.commit(copied_ns=1)
        self.page.wake(step)
        return slot

    def close(self):
        """Part as a process that closes its connection does."""
        self.channel.close()


def meta_of(state, step):
    """Metadata of a capture of the rank that has this state."""
    job = state.job
    start = f"{state.start:016x}"
    rank = job.ranks[state.local_rank]
    return CaptureMeta(RUN, start, step, rank=rank, world_size=job.world_size, captured_ns=1).to_bytes()


def main():
    """Capture, then wait."""
    trainer = HandTrainer(sys.argv[1], memory=WISH)
    trainer.until_state(lambda state: len(state.slots) == WISH.num_slots)
    trainer.change(start=5, step=0, job=JOB)
    for step in sys.argv[2:]:
        trainer.capture(int(step))
    print("captured", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
