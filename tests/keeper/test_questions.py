"""Questions to a keeper, over a real socket, without one."""

import socket
import threading

import pytest
from keeper_jobs import until

from lazysnap.keeper.messages import Connection
from lazysnap.keeper.questions import Questions


@pytest.fixture
def ends():
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    theirs.set_receive_timeout(20)
    yield ours, theirs
    ours.close()
    theirs.close()


def asked(theirs):
    ((message, _),) = theirs.receive()
    return message


def test_an_answer_that_comes_after_the_deadline_is_not_kept(ends):
    ours, theirs = ends
    lock = threading.Condition()
    questions = Questions(lock, lambda: ours)

    assert questions.ask({"type": "inventory"}, 0.0) is None
    late = asked(theirs)
    with lock:
        questions.hear({"type": "inventory", "id": late["id"]})

    assert questions._open == {}


def test_each_question_gets_its_own_answer(ends):
    ours, theirs = ends
    lock = threading.Condition()
    questions, answers = Questions(lock, lambda: ours), []
    thread = threading.Thread(target=lambda: answers.append(questions.ask({"type": "drain"}, 20)))
    thread.start()
    number = asked(theirs)["id"]
    with lock:
        for message in ({"type": "drained"}, {"type": "drained", "id": number + 1}, {"type": "drained", "id": number}):
            questions.hear(message)
        lock.notify_all()
    thread.join(20)

    assert answers == [{"type": "drained", "id": number}]


def test_nobody_waits_for_an_answer_on_a_connection_that_ended(ends):
    ours, theirs = ends
    lock = threading.Condition()
    held, answers = [ours], []
    questions = Questions(lock, lambda: held[0])
    thread = threading.Thread(target=lambda: answers.append(questions.ask({"type": "drain"}, 60)))
    thread.start()
    assert asked(theirs)["type"] == "drain"
    with lock:
        held[0] = None
        lock.notify_all()

    assert until(lambda: answers == [None], 30)
    assert questions.ask({"type": "drain"}, 60) is None
