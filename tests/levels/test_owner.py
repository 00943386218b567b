"""Who made a claim, and whether it lives: guessed wrong, a living writer loses its snapshot or a dead one blocks it."""

import json
import os
import subprocess
import sys

import pytest

from lazysnap.levels.owner import OwnerState, sign, state_of

SIGN = (
    "import sys; from lazysnap.levels.owner import sign; sys.stdout.buffer.write(sign('claim')); sys.stdout.flush(); "
)


def test_what_this_process_signed_is_its_own_and_no_two_are_the_same():
    assert state_of(sign("claim")) is OwnerState.SELF
    assert sign("claim") != sign("claim")


def test_another_process_of_this_host_is_unknown_while_it_lives_and_dead_after():
    child = subprocess.Popen([sys.executable, "-c", SIGN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        signed = child.stdout.readline()
        assert state_of(signed) is OwnerState.UNKNOWN
        child.stdin.close()
    assert state_of(signed) is OwnerState.DEAD


def test_a_child_is_not_its_parent():
    signed = sign("claim")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if state_of(signed) is OwnerState.UNKNOWN and state_of(sign("claim")) is OwnerState.SELF else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"started": "12345"}, OwnerState.DEAD),  # the process id was given to another one
        ({"pid": 2**22 + 1}, OwnerState.DEAD),  # above what Linux gives
        ({"host": "elsewhere"}, OwnerState.UNKNOWN),
        ({"namespace": "1"}, OwnerState.UNKNOWN),
        ({"host": "", "namespace": ""}, OwnerState.UNKNOWN),
        ({"started": ""}, OwnerState.UNKNOWN),
        ({"pid": "12"}, OwnerState.UNKNOWN),
        ({"pid": -1}, OwnerState.UNKNOWN),
        ({"pid": 0}, OwnerState.UNKNOWN),
        ({"pid": 2**80}, OwnerState.UNKNOWN),
    ],
)
def test_nobody_is_called_dead_on_a_guess(change, expected):
    assert state_of(json.dumps({**json.loads(sign("claim")), **change}).encode()) is expected


@pytest.mark.parametrize("signed", [b"", b"\xff", b"[]", b"3", b'"x"', b"null", b"{}", b"probe"])
def test_what_is_no_signature_is_of_nobody_known(signed):
    assert state_of(signed) is OwnerState.UNKNOWN
