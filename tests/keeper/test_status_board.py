"""The status that a keeper sends to its trainers, and what a trainer takes from it for news."""

import pytest

from lazysnap.config import SnapshotConfig
from lazysnap.events import Alert, Complete, LevelFailed, Notice, Protected, Stored
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.events import KeeperEvent
from lazysnap.keeper.held import MAX_COMPLETE
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.protocol import Run, decode, encode
from lazysnap.keeper.status import StatusBoard

URL, FIRST, SECOND = "/disk", "0" * 15 + "1", "0" * 15 + "2"


def complete(*steps, start=FIRST):
    return Complete(t=1.0, level=URL, steps=list(steps), start=start)


def failed(step):
    return LevelFailed(t=float(step), level=URL, step=step, text="full")


def alert(about, text="-", t=0.0):
    return Alert(t=t, about=about, text=text)


@pytest.fixture
def noted():
    return []


@pytest.fixture
def board(noted):
    board = StatusBoard(noted.append)
    board.begin(FIRST)
    return board


class Trainer:
    """A trainer that gets the status of a board, whenever it is asked for news."""

    def __init__(self, start=FIRST):
        self.notices = 0
        config = SnapshotConfig(job_id="board")
        self.client = KeeperClient(JobIdentity.from_config(config), config, on_notice=self.notice)
        self.begin(start)

    def notice(self):
        self.notices += 1

    def begin(self, start):
        fields = {"every_n_steps": 1, "num_kept": 2, "stored": {}, "shared": [], "peers": None}
        self.client.adopt_run(Run("ab" * 8, start, step=0, floor=0, is_new=True, **fields))

    def news(self, board) -> list[KeeperEvent]:
        self.client._state.take(decode(encode(board.status)), ())
        return self.client.poll_events()


def test_each_event_is_news_once_also_if_a_status_comes_twice_or_one_is_missed(board, noted):
    trainer = Trainer()
    board.add(complete(1, 2))
    assert [event.steps for event in trainer.news(board)] == [[1, 2]]
    assert trainer.news(board) == []

    board.add(complete(3))  # nobody looks
    stored = Stored(t=2.0, level=URL, step=4, bytes=1, seconds=1.0, checksum_s=0.0, read_back_s=0.0)
    for event in (failed(4), stored, complete(4), Protected(t=3.0, step=4, start=FIRST), alert("links")):
        board.add(event)

    news = trainer.news(board)
    assert [type(event) for event in news] == [LevelFailed, Stored, Complete, Protected, Alert]
    assert news[2].steps == [3, 4]
    assert trainer.news(board) == []
    assert len(noted) == 7


def test_what_another_start_stored_or_protected_counts_for_no_trainer(board):
    board.add(complete(5, start=SECOND))
    board.add(Protected(t=1.0, step=5, start=SECOND))
    assert board.status.levels == {}

    board.add(complete(5))
    trainer = Trainer(SECOND)
    assert trainer.news(board) == []
    board.begin(SECOND)
    assert trainer.news(board) == []


def test_a_failure_that_repeats_itself_is_news_each_time(board):
    trainer = Trainer()
    for t in (1.0, 2.0):
        board.add(LevelFailed(t=t, level=URL, step=1, text="full"))
        assert [event.step for event in trainer.news(board)] == [1]


def test_of_alerts_about_one_thing_the_last_one_stays_and_of_errors_in_the_keeper_the_last_few(board):
    trainer = Trainer()
    board.add(alert("links", "no link"))
    for number in range(12):
        board.add(alert("keeper", f"error {number}", t=float(number)))
    board.add(alert("links", ""))

    texts = [event.text for event in trainer.news(board)]
    assert texts == [*(f"error {number}" for number in range(4, 12)), ""]
    board.forget_troubles()
    assert Trainer().news(board) == [alert("links", "")]


def test_errors_in_the_keeper_reach_a_trainer_of_any_start(board):
    board.add(alert("keeper", "failed"))

    assert [event.text for event in Trainer(SECOND).news(board)] == ["failed"]


def test_a_notice_is_given_once(board):
    trainer = Trainer()
    board.add(Notice(t=1.0))
    board.add(complete(1))
    for _ in range(2):
        trainer.news(board)

    assert trainer.notices == 1
    trainer.begin(SECOND)
    board.begin(SECOND)
    trainer.news(board)
    assert trainer.notices == 1


def test_a_status_of_a_long_training_is_as_long_as_that_of_a_short_one(board):
    for step in range(2000):
        board.add(complete(step))

    [level] = board.status.levels.values()
    assert level.complete == list(range(2000 - MAX_COMPLETE, 2000))
    assert level.complete_at == 1.0
    assert Trainer().news(board)[0].steps == level.complete
