"""A keeper's end of connections, driven by a test: at the socket of a job, or at the descriptor that a process got."""

import os
import select
import socket

from lazysnap.core.messages import KeeperState, TrainerState
from lazysnap.keeper.questions import Answer, Question
from lazysnap.keeper.wire import Channel
from lazysnap.memory.slots import KeeperSlot, make_slot
from lazysnap.memory.words import NodePage

TIMEOUT_S = 60.0
PID = 4242
"""The process that it says to be."""


def handed_over_slot(size_bytes=4096):
    """A slot, as its maker has it."""
    return make_slot(4096, size_bytes)


class Peer:
    """One connection, which a test reads and answers."""

    def __init__(self, sock):
        self.channel = Channel(sock)
        self.page = NodePage.create()
        self.is_greeted = False
        self.states = []
        """All that the trainer sent, but for questions."""
        self.questions = []
        self.slots = {}
        """Slots that came along, by id."""

    def read(self, timeout_s=TIMEOUT_S):
        """Take what arrives next. ``False`` at the end."""
        self.channel.wait(timeout_s)
        frames = self.channel.receive()
        for frame in frames or []:
            if isinstance(frame.message, TrainerState):
                self.states.append(frame.message)
                for slot_id, descriptor in zip(frame.message.slots, frame.descriptors, strict=False):
                    self.slots[slot_id] = KeeperSlot.attach(descriptor)
                    assert self.slots[slot_id].slot_id == slot_id
                frame.descriptors = []
            elif isinstance(frame.message, Question):
                self.questions.append(frame.message)
            frame.close()
        return frames is not None

    def state(self, is_awaited=lambda state: True):
        """The newest state of the trainer, once ``is_awaited`` of it."""
        while not self.states or not is_awaited(self.states[-1]):
            assert self.read(), "the trainer hung up"
        return self.states[-1]

    def question(self):
        """The next question."""
        while not self.questions:
            assert self.read(), "the trainer hung up"
        return self.questions.pop(0)

    def send(self, descriptors=(), **fields):
        """Send a state; the first one with page and eventfd."""
        descriptors = list(descriptors)
        if not self.is_greeted and not fields.get("refusal"):
            descriptors = [*self.page.descriptors, *descriptors]
        self.is_greeted = True
        self.channel.send(KeeperState(pid=PID, **fields), descriptors)

    def answer(self, number, memory):
        self.channel.send(Answer(number=number, memory=memory))

    def is_awake(self):
        """True once, after the trainer rang."""
        try:
            return os.eventfd_read(self.page.event_descriptor) > 0
        except BlockingIOError:
            return False

    def is_ended(self):
        """True once the trainer hung up."""
        while self.read():
            pass
        return True

    def end(self):
        """Send nothing more: the trainer sees that the keeper has ended."""
        self.channel._socket.shutdown(socket.SHUT_WR)

    def close(self):
        self.channel.close()
        self.page.close()
        for slot in self.slots.values():
            slot.close()
        self.slots = {}


class FakeKeeper:
    """Listens for the trainers of a job, as its keeper."""

    def __init__(self, identity):
        self._lock = identity.files.try_lock()
        self._listener = self._lock.bind()
        self._listener.listen()
        self._peers = []

    def is_called(self, timeout_s):
        """True once somebody connected."""
        readable, _, _ = select.select([self._listener], [], [], timeout_s)
        return bool(readable)

    def accept(self):
        """The next connection."""
        assert self.is_called(TIMEOUT_S), "nobody connected"
        sock, _ = self._listener.accept()
        self._peers.append(Peer(sock))
        return self._peers[-1]

    def close(self):
        for peer in self._peers:
            peer.close()
        self._peers = []
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._lock.remove()
            self._lock.close()
