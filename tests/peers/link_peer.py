"""A keeper's end of a link, as a process: node 1 connects to node 0 and answers each order with a report."""

import asyncio
import sys

from msgspec import structs
from support.peer_ends import Table, settings_of

from lazysnap.core.actions import PlainEvent
from lazysnap.core.messages import Order, Report
from lazysnap.peers.server import Peers


def main():
    port = int(sys.argv[1])
    settings = settings_of(sys.stdin.read(), [port, 0])
    loop = asyncio.new_event_loop()

    def handle(event):
        match event:
            case PlainEvent.PEER_UP:
                peers.send(0, Report(1, 0, 0, ()))
            case Order():
                peers.send(0, Report(1, 0, event.coordinator, ()))

    peers = Peers(loop, handle, Table())
    loop.call_soon(peers.begin, structs.replace(settings, node=1))
    loop.run_forever()


if __name__ == "__main__":
    main()
