"""Two ranks of one node: their keeper is a process, whose trainer this process is; or what it does is in here."""

import contextlib
import os
import signal

from support.waiting import until

from lazysnap.arena import Slot, Word
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.keeper.attach import attach
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import start_keeper, try_connect
from lazysnap.keeper.persist import Persister
from lazysnap.keeper.protocol import Adopt
from lazysnap.keeper.team import Team
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, FrozenReference
from lazysnap.topology import places

RUN, START = "0123456789abcdef", "00000000deadbeef"
SIZES = (5000, 300_001)


def image_of(rank, step):
    """The shard of one of the two ranks."""
    layout = Layout.plan([TensorSpec("x", "U8", (SIZES[rank],))])
    return layout.header + bytes([(step + 100 * rank) % 251]) * SIZES[rank]


def capture(rank, step, *, whole=True, pin=False, frozen=None, start=START):
    """A slot with a capture that is whole, or of which the header has landed."""
    image = image_of(rank, step)
    slot = Slot.create(1 << 16, len(image))
    slot.set_word(Word.READY, 1)
    meta = CaptureMeta(RUN, start, step, rank, 2, 3, frozen=frozen)
    slot.begin(step, sequence=step, image_bytes=len(image), meta=meta.to_bytes(), pin=pin)
    slot.image[: len(image)] = image
    slot.advance(4096)
    if whole:
        slot.commit()
    return slot


def frozen_slot(content):
    """Frozen tensors, and how a capture refers to them."""
    layout = Layout.plan([TensorSpec("base", "U8", (len(content),))])
    image = layout.header + content
    slot = Slot.create(1 << 16, len(image))
    slot.begin(0, sequence=1, image_bytes=len(image), meta=CaptureMeta(RUN, START, 0, 0, 1, 3).to_bytes(), pin=False)
    slot.image[: len(image)] = image
    slot.commit()
    return slot, FrozenReference(Checksums.of(memoryview(image)).whole, len(image))


def reach_keeper(identity):
    """A connection to the keeper, which is started where there is none."""
    connection = try_connect(identity)
    if connection is None:
        start_keeper(identity).connection.close()
        connection = until(lambda: try_connect(identity))
    return connection


class Member:
    """One of them, by default the second."""

    def __init__(self, root, *, rank=1, faster=(), **settings):
        self.rank = rank
        self.url = str(root / "level")
        self.identity = JobIdentity.from_config(SnapshotConfig(job_id=str(root)))
        self.teams = [Team.of(places(["here", "here"]), rank) for rank in (0, 1)]
        self.level = PersistentLevel(self.url, **{"timeout_s": 30, "every_n_steps": 1, **settings})
        self.config = SnapshotConfig(levels=(*faster, self.level))
        self.connection = None
        self.slots = {}
        self.events = []

    def start(self):
        self.connection, _ = attach(self.identity, self.config, self.teams[self.rank])
        return self

    def adopt(self, step, **settings):
        """Hand the keeper a slot with a capture of ``step``."""
        slot = self.slots[step] = capture(self.rank, step, **settings)
        self.connection.send(Adopt(), (slot.fd,))
        return slot

    def told(self, kind):
        """Steps that the keeper told of so far."""
        self.connection.set_receive_timeout(0.05)
        for message, fds in self.connection.receive() or []:
            self.events.append(message)
            for fd in fds:
                os.close(fd)
        return [event.step for event in self.events if isinstance(event, kind)]

    def close(self):
        if self.connection is not None:
            self.connection.close()
        with contextlib.closing(reach_keeper(self.identity)) as connection:
            os.kill(connection.peer_pid, signal.SIGKILL)
        for slot in self.slots.values():
            slot.close()


class Here:
    """One of the two ranks: what its keeper does about levels, in this process."""

    def __init__(self, member, rank):
        self.rank, self.slots, self.events, self.frozen = rank, [], [], {}
        found = (lambda: list(self.slots), self.events.append, self.frozen.get)
        self.persister = Persister((member.level,), *found, member.teams[rank])

    def adopt(self, step, **settings):
        self.slots.append(capture(self.rank, step, **settings))
        self.persister.wake()
        return self.slots[-1]

    def told(self, kind):
        return [event.step for event in self.events if isinstance(event, kind)]

    def close(self):
        until(self.persister.is_drained)
        self.persister.stop()


class Lead(Here):
    """The first of them."""

    def __init__(self, member):
        super().__init__(member, 0)
