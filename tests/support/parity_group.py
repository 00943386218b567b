"""Nodes in this process whose keepers protect each other's captures: real slots, sockets and tasks; no core."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lazysnap.core.actions import StepStored, Task, TaskEnded, WriteLevel
from lazysnap.core.messages import JobSettings, PeerSettings, RedundancySettings, StepKey
from lazysnap.keeper.parity import ParityContext, ParityStore, run_parity_task
from lazysnap.keeper.peer_sources import KeeperSources
from lazysnap.keeper.tasks import TaskControl
from lazysnap.levels.watched import RateLimiter
from lazysnap.memory.slots import KeeperSlot, TrainerSlot, make_slot
from lazysnap.peers.secret import draw_secret
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from support.peer_ends import End, LoopThread, ports, settings_of
from support.waiting import TIMEOUT_S

RUN = "0123456789abcdef"
START = 0x1122334455667788
LEVEL = 2
LAYOUT = Layout.plan([TensorSpec("x", "U8", (300_000,))])
NUM_SLOTS = 3


def image_of(step: int, rank: int) -> bytes:
    """Return the shard of a rank."""
    return LAYOUT.header + bytes([(step + 100 * rank) % 251]) * (LAYOUT.size_bytes - len(LAYOUT.header))


class Captures:
    """The slots of one rank: the trainer's ends, and the keeper's."""

    def __init__(
        self, rank: int, world_size: int, layout: Layout = LAYOUT, facts: dict[str, Any] | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.sequence = 0
        self._layout = layout
        self._facts = facts or {}
        self.keeper: dict[int, KeeperSlot] = {}
        self.trainer: list[TrainerSlot] = []
        for _ in range(NUM_SLOTS):
            slot = make_slot(1 << 16, layout.size_bytes)
            self.keeper[slot.slot_id] = slot
            self.trainer.append(TrainerSlot.attach(os.dup(slot.descriptor)))

    def begin(self, step: int, start: int = START) -> TrainerSlot:
        """Begin a capture, in the slot that was used the longest ago."""
        slot = self.trainer[self.sequence % NUM_SLOTS]
        self.sequence += 1
        meta = CaptureMeta(RUN, f"{start:016x}", step, self.rank, self.world_size, 0, tensors=self._facts)
        size_bytes = self._layout.size_bytes
        slot.begin(start, step, sequence=self.sequence, image_bytes=size_bytes, meta=meta.to_bytes())
        return slot

    def fill(self, slot: TrainerSlot, share: float = 1.0) -> TrainerSlot:
        """Copy a share of the image of the capture."""
        step = slot.view().step
        assert step is not None
        image = self._layout.header.ljust(self._layout.size_bytes, bytes([(step + 100 * self.rank) % 251]))
        upto = int(len(image) * share)
        slot.image[:upto] = image[:upto]
        slot.advance(upto)
        return slot

    def capture(self, step: int, start: int = START) -> TrainerSlot:
        """Make a whole capture."""
        slot = self.fill(self.begin(step, start))
        slot.commit(copied_ns=1)
        return slot

    def place(self, step: int) -> tuple[int, int]:
        """Return the slot id and sequence number of a step."""
        for slot in self.trainer:
            view = slot.view()
            if view.step == step:
                return view.slot_id, view.sequence
        raise AssertionError(f"step {step} is not in memory")

    def close(self) -> None:
        for slot in (*self.trainer, *self.keeper.values()):
            slot.close()


class Control(TaskControl):
    """The control of a task of a test."""

    def __init__(self, on_beat: Callable[[], None] = lambda: None) -> None:
        super().__init__(Task(LEVEL, 1), lambda event: None)
        self.num_beats = 0
        self._on_beat = on_beat

    def beat(self) -> None:
        self.num_beats += 1
        self._on_beat()
        super().beat()


class Node:
    """One node: its captures, its keeper's end, and its parity."""

    def __init__(self, thread: LoopThread, number: int, job: JobSettings, peers: PeerSettings) -> None:
        self.number = number
        self.ranks = [Captures(rank, job.world_size) for rank in job.ranks]
        self.store = ParityStore()
        self.context = ParityContext(job, peers, self.store, RateLimiter(None))
        self.sources = KeeperSources(self.slots, lambda start: len(self.ranks), self.store)
        self._thread = thread
        self.end = End(thread, self.sources).begin(peers, number)
        self.is_dead = False

    def slots(self) -> dict[int, dict[int, KeeperSlot]]:
        """Return the slots by local rank and slot id."""
        return {local_rank: dict(captures.keeper) for local_rank, captures in enumerate(self.ranks)}

    def capture(self, step: int) -> None:
        for captures in self.ranks:
            captures.capture(step)

    def write(self, step: int, number: int = 1) -> WriteLevel:
        """Return the task that protects a step."""
        places = [(local_rank, captures.place(step)[0]) for local_rank, captures in enumerate(self.ranks)]
        return WriteLevel(LEVEL, number, StepKey(START, step), tuple(places))

    def run(self, task: Task, control: Control | None = None) -> TaskEnded:
        return run_parity_task(task, self.context, self.slots(), control or Control())

    def die(self) -> None:
        """The keeper is gone, and the captures that it served."""
        if not self.is_dead:
            self.is_dead = True
            self.end.close()

    def come_back(self, peers: PeerSettings) -> None:
        """Another keeper serves what the one that died did."""
        self.is_dead = False
        self.end = End(self._thread, self.sources).begin(peers, self.number)

    def close(self) -> None:
        self.die()
        for captures in self.ranks:
            captures.close()


class ParityGroup:
    """All nodes of one group."""

    def __init__(self, nodes: int = 3, *, ranks: int = 1, parity: int = 1, block_bytes: int = 1 << 16) -> None:
        self._stack = contextlib.ExitStack()
        self.thread = LoopThread()
        self._stack.callback(self.thread.close)
        self.secret = draw_secret()
        self.peers = settings_of(self.secret, self._stack.enter_context(ports(nodes)))
        redundancy = RedundancySettings(
            members=tuple(range(nodes)), parity=parity, most_lost=parity, block_bytes=block_bytes
        )
        self.nodes = []
        for number in range(nodes):
            job = JobSettings(
                RUN,
                (),
                redundancy,
                ranks=tuple(range(number * ranks, (number + 1) * ranks)),
                world_size=nodes * ranks,
                node=number,
                num_nodes=nodes,
            )
            node = Node(self.thread, number, job, self.peers)
            self._stack.callback(node.close)
            self.nodes.append(node)

    def capture(self, step: int) -> None:
        for node in self.nodes:
            node.capture(step)

    def run_all(self, tasks: Sequence[Task], controls: Sequence[Control] | None = None) -> list[TaskEnded]:
        """Run a task on each node, at the same time, and return how they ended."""
        ended: dict[int, TaskEnded] = {}

        def run(node: Node, task: Task, control: Control) -> None:
            ended[node.number] = node.run(task, control)

        chosen = controls or [Control() for _ in self.nodes]
        threads = []
        for node, task, control in zip(self.nodes, tasks, chosen, strict=True):
            threads.append(threading.Thread(target=run, args=(node, task, control)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        return [ended[node.number] for node in self.nodes]

    def protect(self, step: int) -> list[TaskEnded]:
        """Have a step captured, and protected by all nodes."""
        self.capture(step)
        ended = self.run_all([node.write(step) for node in self.nodes])
        assert all(isinstance(event, StepStored) for event in ended), ended
        return ended

    def close(self) -> None:
        self._stack.close()
