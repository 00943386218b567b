"""One node as a process: its storage, one rank, and frozen tensors that the other node holds as well.

base_node.py <node> <port> <level>   (then a line with the secret)
capture     its rank captures the step that is granted, as soon as there is one
"""

import os
import sys

from support.node_rig import STARTS, Rig, frozen_slot
from support.waiting import until

from lazysnap.config import PersistentLevel
from lazysnap.keeper.protocol import Peers
from lazysnap.links.secret import Secret


class OneOfTwo(Rig):
    """A training of two nodes, of which this process is one."""

    def __init__(self, node, port, url, secret):
        slot, self.reference = frozen_slot()
        level = PersistentLevel(url, every_n_steps=1, shared=True)
        super().__init__(level, nodes=2, frozen={self.reference.digest: slot})
        self._peers = Peers("job", "127.0.0.1", port, secret)
        if node == 0:
            self.reads[0].serve(("127.0.0.1", port), secret)
        self.start, self.told_to = STARTS[0], [[], []]
        self.rank = self.nodes[node][0]
        self.rank.begin_run(self.start)
        self.storages = [self._storage(node, is_new=True)]
        self.nodes = [[self.rank]]

    def capture_granted(self):
        until(lambda: self.granted is not None)
        self.capture(self.granted, frozen=self.reference)


def main():
    node, port, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    training = OneOfTwo(node, port, url, Secret(sys.stdin.readline().strip()))
    for _ in sys.stdin:
        training.capture_granted()
    os._exit(0)  # what hangs is left


if __name__ == "__main__":
    main()
