"""Asks a keeper a question from a process that is not its trainer, on a separate connection."""

import contextlib
import os
import time

from lazysnap.errors import FormatError, KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.memory_inventory import MemoryInventory
from lazysnap.keeper.questions import Answer, Question
from lazysnap.keeper.wire import Channel
from lazysnap.memory.slots import Slot


def ask(channel: Channel, question: Question, timeout_s: float) -> Answer:
    """Ask a keeper one question. See ``ask_for_slots``; received descriptors are closed."""
    answer, descriptors = ask_for_slots(channel, question, timeout_s)
    for descriptor in descriptors:
        os.close(descriptor)
    return answer


def ask_for_slots(channel: Channel, question: Question, timeout_s: float) -> tuple[Answer, list[int]]:
    """Ask a keeper one question.

    Blocks: at most ``timeout_s``.

    Args:
        channel: a connection to the keeper, which stays open.
        question: the question.
        timeout_s: seconds to wait for the answer.

    Returns: the answer and its descriptors. The caller closes them.
    Raises: TimeoutError, if there is no answer in time; other OSErrors, if the keeper ends; KeeperError, if the other
    process does not speak this protocol.
    """
    deadline_s = time.monotonic() + timeout_s
    channel.send(question)
    is_in_time = True
    while is_in_time:
        channel.wait(max(0.0, deadline_s - time.monotonic()))
        # Receive before checking the deadline: this process may have been stopped while the answer arrived.
        is_in_time = time.monotonic() < deadline_s
        channel.flush()
        frames = channel.receive()
        if frames is None:
            raise ConnectionResetError("the keeper ended")
        answer: tuple[Answer, list[int]] | None = None
        for frame in frames:
            if isinstance(frame.message, Answer) and answer is None:
                answer = (frame.message, frame.descriptors)
            else:
                frame.close()
        if answer is not None:
            return answer
    raise TimeoutError("no answer in time")


class NeighbourMemory:
    """The captures of one rank of this node, readable while this is open, even if the keeper ends.

    Example::

        memory = NeighbourMemory(identity, local_rank=1, timeout_s=10.0)
        print([entry.step for entry in memory.inventory.entries])
        memory.close()
    """

    def __init__(self, identity: JobIdentity, local_rank: int, timeout_s: float) -> None:
        """Ask the keeper of the job, and map the memory of that rank."""
        self._slots: dict[int, Slot] = {}
        channel = try_connect(identity)
        if channel is None:
            raise KeeperError(f"no keeper of job {identity.job_id!r}")
        question = Question(about="memory", local_rank=local_rank)
        try:
            answer, descriptors = ask_for_slots(channel, question, timeout_s)
        except OSError as error:
            raise KeeperError(f"the keeper of job {identity.job_id!r}: no answer: {error}") from error
        finally:
            channel.close()
        for descriptor in descriptors:
            self._map(descriptor)
        if answer.memory is None:
            self.close()
            raise KeeperError(f"the keeper of job {identity.job_id!r} does not say what it holds: {answer.text}")
        self.inventory = MemoryInventory.of(answer.memory, self._slots)

    def _map(self, descriptor: int) -> None:
        """Map a slot. A slot that cannot be mapped is ignored."""
        with contextlib.suppress(FormatError, OSError):
            slot = Slot.attach(descriptor)
            self._slots[slot.slot_id] = slot

    def close(self) -> None:
        """Unmap. Bytes that other objects still read stay mapped."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
