"""A keeper's end of a link, as a process: node 1 connects to node 0 and answers each order with a report."""

import asyncio
import sys

from support.peer_ends import Table, settings_of

from lazysnap.core.messages import Report
from lazysnap.peers.server import Peers


class Answering:
    def serving(self):
        pass

    def peer_up(self, node):
        self.peers.send(node, Report(1, 0, 0, ()))

    def received(self, node, message):
        self.peers.send(node, Report(1, 0, message.coordinator, ()))


def main():
    port = int(sys.argv[1])
    settings = settings_of(sys.stdin.read(), [port, 0])
    loop = asyncio.new_event_loop()
    handler = Answering()
    handler.peers = Peers(loop, handler, Table())
    loop.call_soon(handler.peers.begin, settings, 1)
    loop.run_forever()


if __name__ == "__main__":
    main()
