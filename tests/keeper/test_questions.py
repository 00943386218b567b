"""Questions to a keeper, over a real socket, without one."""

import socket
import struct
import threading

import pytest
from support.waiting import until

from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import Done, Drain
from lazysnap.keeper.questions import Questions


@pytest.fixture
def ends():
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    theirs.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 20, 0))
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

    assert questions.ask(Drain(step=1), 0.0) is None
    late = asked(theirs)
    with lock:
        questions.receive(Done(id=late.id, ok=True))

    assert questions._open == {}


def test_each_question_gets_its_own_answer(ends):
    ours, theirs = ends
    lock = threading.Condition()
    questions, answers = Questions(lock, lambda: ours), []
    thread = threading.Thread(target=lambda: answers.append(questions.ask(Drain(step=1), 20)))
    thread.start()
    number = asked(theirs).id
    with lock:
        for message in (Done(), Done(id=number + 1, ok=True), Done(id=number, ok=True)):
            questions.receive(message)
        lock.notify_all()
    thread.join(20)

    assert answers == [Done(id=number, ok=True)]


def test_nobody_waits_for_an_answer_on_a_connection_that_ended(ends):
    ours, theirs = ends
    lock = threading.Condition()
    held, answers = [ours], []
    questions = Questions(lock, lambda: held[0])
    thread = threading.Thread(target=lambda: answers.append(questions.ask(Drain(step=1), 60)))
    thread.start()
    assert asked(theirs).step == 1
    with lock:
        held[0] = None
        lock.notify_all()

    assert until(lambda: answers == [None])
    assert questions.ask(Drain(step=1), 60) is None


def test_who_is_told_of_progress_holds_up_no_answer(ends):
    """It may print to a terminal that stands still; what the keeper says is taken in by another thread meanwhile."""
    ours, theirs = ends
    lock = threading.Condition()
    questions, answers = Questions(lock, lambda: ours), []
    told, goes_on = threading.Event(), threading.Event()

    def meanwhile():
        told.set()
        assert goes_on.wait(60)

    thread = threading.Thread(target=lambda: answers.append(questions.ask(Drain(step=1), 60, meanwhile)))
    thread.start()
    number = asked(theirs).id

    def is_told():
        with lock:  # as the thread that receives does after each message of the keeper
            lock.notify_all()
        return told.is_set()

    assert until(is_told)
    is_free = lock.acquire(timeout=20)
    if is_free:
        questions.receive(Done(id=number, ok=True))
        lock.release()
    goes_on.set()
    thread.join(60)

    assert is_free
    assert answers == [Done(id=number, ok=True)]
