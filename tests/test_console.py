"""The lines that every user sees."""

import logging
import os
import re
import subprocess
import sys
import threading

import pytest
from tqdm import tqdm

from lazysnap.console import said_after, say


def unconfigure(monkeypatch):
    """As in a program that never configured logging."""
    logger = logging.getLogger("lazysnap")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [one for one in logger.handlers if type(one).__name__ == "_Console"])


def test_without_logging_they_go_to_stderr(monkeypatch, capsys):
    unconfigure(monkeypatch)
    say("a line")

    assert capsys.readouterr().err == "lazysnap: a line\n"


def test_while_a_bar_of_tqdm_is_shown_a_message_has_a_line_of_its_own(monkeypatch, capsys):
    unconfigure(monkeypatch)
    with tqdm(total=3, ncols=40, file=sys.stderr) as bar:
        bar.update()
        say("a line")

    lines = re.split("[\\r\\n]", capsys.readouterr().err)
    assert "lazysnap: a line" in lines


def test_the_thread_of_a_late_line_ends_with_its_context():
    threads = threading.enumerate()
    for _ in range(100):
        with said_after(60, str):
            pass
        assert threading.enumerate() == threads


PROGRAM = """
import logging
import lazysnap
from lazysnap.console import say
say("a run starts")
logging.getLogger("lazysnap.engine").warning("step %d skipped", 3)
logging.getLogger("lazysnap.engine").info("nothing")
logging.basicConfig(format="LOG %(message)s")
logging.getLogger("lazysnap.engine").warning("once")
say("below the level")
"""


def test_without_logging_every_line_says_whose_it_is_and_with_logging_the_program_decides():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines() == ["lazysnap: a run starts", "lazysnap: step 3 skipped", "LOG once"]


@pytest.mark.parametrize("how", ["its reader ended", "closed"])
def test_a_terminal_that_is_gone_ends_no_training(monkeypatch, capsys, how):
    unconfigure(monkeypatch)
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "wb", buffering=0)
    if how == "closed":
        stream.close()
    with monkeypatch.context() as gone:
        gone.setattr(sys, "stderr", Text(stream))
        with pytest.raises((OSError, ValueError)):
            sys.stderr.write("a line")
        say("a line")
    stream.close()

    say("the next line")
    assert capsys.readouterr().err == "lazysnap: the next line\n"


class OnlyWrites:
    """What a program may set as stderr."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_an_object_that_can_only_write_gets_every_line(monkeypatch):
    unconfigure(monkeypatch)
    stream = OnlyWrites()
    with monkeypatch.context() as replaced:
        replaced.setattr(sys, "stderr", stream)
        say("a line")

    assert stream.text == "lazysnap: a line\n"


class Text:
    """A text stream without a buffer: what cannot be written is not tried again when it goes."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self.stream.write(text.encode())

    def flush(self):
        self.stream.flush()
