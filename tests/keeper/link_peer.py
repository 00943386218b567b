"""A keeper's end of a link, as a process: node 1 connects to node 0 and answers each order with a report."""

import sys
import threading

from lazysnap.grants.messages import Report
from lazysnap.links.links import Hello, Links
from lazysnap.links.secret import Secret


class Answering:
    def link_is_up(self, node):
        self.links.send(node, Report(1, 0, ()))

    def link_is_down(self, node):
        pass

    def received(self, node, message):
        self.links.send(node, Report(1, message.owner, ()))


def main():
    port, secret = int(sys.argv[1]), Secret(sys.stdin.read())
    handler = Answering()
    handler.links = Links(secret, Hello("job", "s1", 1), handler)
    handler.links.connect(0, "127.0.0.1", port)
    threading.Event().wait()


if __name__ == "__main__":
    main()
