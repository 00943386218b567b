"""The network of nodes is as slow as a test asks for. That nodes go away and are parted, all other tests show."""

import pathlib
import sys

from support.waiting import until

WIRE = (sys.executable, str(pathlib.Path(__file__).with_name("wire.py")))


def serve(node):
    server = node.start([*WIRE, "serve"])
    until(lambda: server.output, lambda: "the server does not start")


def ask(node, other, count=5):
    """Median of the seconds to an answer, and the share of answers that did not come."""
    median_s, answers = node.run(*WIRE, "ask", other.name, str(count)).split()
    return float(median_s), 1 - int(answers) / count


def pour(node, other, size):
    """Bytes per second."""
    return float(node.run(*WIRE, "pour", other.name, str(size)))


def test_a_cable_is_as_slow_as_it_was_made(cluster):
    one, other = cluster.nodes
    serve(other)
    size = 2 << 20

    other.shape(rate="100mbit", delay_s=0.005)
    assert ask(one, other)[0] >= 0.010, "both directions"
    assert pour(one, other, size) < 13e6
    other.shape(loss=0.01)
    assert ask(one, other, 1000)[1] > 0.005
