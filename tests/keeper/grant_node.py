"""One node as a process: slots in its memory, node files in a directory, grants over links; driven by lines on stdin.

grant_node.py <node> <nodes> <port of node 0> <directory>   (then a line with the secret)
capture 10      all ranks begin a step, and hold it whole
require 10      it must be stored
die             the trainers are dead, memory stays
part            no link to other nodes any more
break pin       the next action of this name raises an error
"""

import os
import pathlib
import random
import sys
import threading
import time

from support.listing import files_below

from lazysnap.config import PersistentLevel
from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.coordinator import Coordinator, LevelGrants
from lazysnap.grants.core import Begin, Core, Learn, Pin, ReleaseStalePins
from lazysnap.grants.messages import StepKey
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, SlotView
from lazysnap.grants.retention import Retention
from lazysnap.keeper.grant_loop import GrantLoop
from lazysnap.links.links import Hello, Links
from lazysnap.links.listener import Deadlines
from lazysnap.links.secret import Secret
from lazysnap.links.server import PeerServer

NUM_RANKS = 2
QUICK = Deadlines(connect_s=20, send_s=20, alive_s=0.2, silence_s=20)


def say(*words):
    """One line, whole, from any thread."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Node:
    """What a keeper is to ``GrantLoop``."""

    def __init__(self, node, num_nodes, directory):
        self.node, self.num_nodes, self.directory = node, num_nodes, pathlib.Path(directory)
        self.lock, self.word, self.begun, self.is_gone = threading.RLock(), None, -1, False
        self.breaks = ""
        self.slots = [{"step": None, "pin": None} for _ in range(NUM_RANKS * 3)]
        self.retention = Retention(PersistentLevel(str(directory), every_n_steps=10), "s1")

    def path(self, step):
        return self.directory / f"step-{step}" / f"node-{self.node}"

    def stored(self):
        return {int(path.parent.name[5:]) for path in files_below(self.directory, f"node-{self.node}")}

    def capture(self, step):
        with self.lock:
            self.begun = step
            for rank in range(NUM_RANKS):
                own = self.slots[3 * rank : 3 * rank + 3]
                newest = max((slot["step"] for slot in own if slot["step"] is not None), default=None)
                free = [
                    slot for slot in own if slot["pin"] is None and (slot["step"] is None or slot["step"] != newest)
                ]
                slot = min(free, key=lambda slot: -1 if slot["step"] is None else slot["step"])
                slot.update(step=step, pin=step if self.word == step else None)

    def views(self):
        with self.lock:
            ranks = [self.slots[3 * rank : 3 * rank + 3] for rank in range(NUM_RANKS)]
            return [
                RankView(
                    self.begun,
                    self.is_gone,
                    tuple(SlotView(slot["step"], True, slot["pin"]) for slot in own if slot["step"] is not None),
                )
                for own in ranks
            ]

    def break_once(self, action):
        if action == self.breaks:
            self.breaks = ""
            say("broken", 0)
            raise OSError(f"{action} is broken")

    def act(self, action):
        self.break_once(type(action).__name__.lower())
        match action:
            case ReleaseStalePins(word):
                with self.lock:
                    self.word = word
                    for slot in self.slots:
                        slot["pin"] = slot["pin"] if slot["pin"] == word else None
            case Pin(ranks, step):
                with self.lock:
                    for rank in ranks:
                        for slot in self.slots[3 * rank : 3 * rank + 3]:
                            slot["pin"] = step if slot["step"] == step else slot["pin"]
            case Begin(write):
                threading.Thread(target=self._write, args=(write,), daemon=True).start()
            case Learn():
                self.learn(self.loop.node.levels)

    def _write(self, write):
        slots = [rank.holding(write.step) for rank in self.views()]
        if any(slot is None or (slot.pin != write.step and not write.is_alone) for slot in slots):
            self.loop.post(self.loop.core.missed, write)
        elif self.loop.is_wanted(write):
            self.path(write.step).parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path(write.step).with_name(f"unfinished-{self.node}")
            unfinished.write_text(f"step {write.step} of node {self.node}")
            unfinished.rename(self.path(write.step))  # a node that is killed leaves it whole, or not at all
            self.loop.post(self.loop.node.committed, write)
            self.loop.post(self.loop.core.verified, write)

    def learn(self, levels):
        complete = sorted(key.step for key in levels[0].complete)
        say("complete", *complete)
        for step in self.stored():
            if self.retention.is_over(StepKey(step, "s1"), levels[0]) and self.loop.give_up(0, step):
                self.path(step).unlink()


def main():
    number, num_nodes, port, directory = (*map(int, sys.argv[1:4]), sys.argv[4])
    secret = Secret(sys.stdin.buffer.readline().decode().strip())
    node = Node(number, num_nodes, directory)
    coordinator = None
    if number == 0:
        levels = (LevelGrants(node.retention.settings),)
        coordinator = Coordinator(random.getrandbits(60), "s1", num_nodes, levels)
    grants = NodeGrants(number, "s1", (NodeLevel(node.stored()),))
    node.loop = GrantLoop(
        Core(grants, coordinator, StoringAlone(grants, 1, 0.5), time.monotonic()), node.views, node.act
    )
    links = Links(secret, Hello("job", "s1", number), node.loop, QUICK)
    node.loop.start(links)
    if number == 0:
        server = PeerServer(secret, lambda what: None, QUICK)
        server.admit(links)
        say("port", server.listen("127.0.0.1", port)[1])
    else:
        links.connect(0, "127.0.0.1", port)
        say("port", port)
    for line in sys.stdin.buffer:
        command, *rest = line.decode().split()
        if command == "capture":
            node.capture(int(rest[0]))
            say("captured", rest[0])
        elif command == "require":
            node.loop.post(grants.require, int(rest[0]), [0])
        elif command == "break":
            node.breaks = rest[0]
        elif command == "die":
            node.is_gone = True
        elif command == "part":
            links.close()
            node.loop.link_is_down(0)  # of links that it closes itself nobody is told
        node.loop.slots_changed()
    node.loop.close()
    links.close()


if __name__ == "__main__":
    main()
