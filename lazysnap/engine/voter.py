"""One rank's part in agreeing on snapshots that all have: what it asks the board next. No thread, no clock."""

from collections.abc import Callable

from lazysnap import faults
from lazysnap.engine.ballot import Ballot, next_candidate
from lazysnap.engine.board import Board
from lazysnap.engine.marks import Marks, Presence


class Voter:
    """Joins a candidate when its capture is whole and marked, calls a later one when it has not got it.

    Each ``act`` is at most one question to the board. An answer that is lost changes nothing: a question whose outcome
    is not known is never asked a second time where it would count twice.
    """

    def __init__(self, marks: Marks, look: Callable[[int], Presence], world_size: int, every: int) -> None:
        self._marks = marks
        self._look = look
        self._world_size = world_size
        self._every = every
        self._ballot: Ballot | None = None
        self._is_late = False
        """Whether this rank was past the candidate when it heard of it."""
        self._joined: int | None = None
        """The last candidate that this rank counted itself for, or may have."""
        self._count: int | None = None
        """How many were counted then; ``None``: the answer was lost."""
        self.passed: int | None = None
        """The last boundary whose capture began, or was left out."""

    def is_idle(self) -> bool:
        """Whether there is nothing to ask before this rank comes to the candidate."""
        if self.passed is None:
            return True
        return self._ballot is not None and self.passed < self._ballot.candidate

    def has_to_tell(self) -> bool:
        """Whether this rank came to the candidate and did not say yet what it has of it; or knows of none."""
        ballot = self._ballot
        return not self.is_idle() and (ballot is None or self._joined != ballot.candidate)

    def act(self, board: Board, key: str) -> bool:
        """Ask what is to be asked now. Whether anything moved, so that it may be worth asking on at once.

        Blocks: one round trip. Raises: BoardUnavailable.
        """
        passed, ballot = self.passed, self._ballot
        if passed is None:
            return False
        if ballot is None:
            first = Ballot(self._marks.agreed, next_candidate(passed, self._every, 0), 0)
            return self._ask(board, key, "", str(first))
        if ballot.candidate == self._joined:
            if self._count is None:
                # It may have been counted, so it must not count again: this candidate can come to nothing any more,
                # unless all were counted already; then it is too late to call another one.
                return self._raise(board, key, ballot, passed)
            if self._count < self._world_size:
                return self._ask(board, key, "?", "?")
            faults.point("engine.agreement.agree")
            return self._ask(board, key, str(ballot), str(ballot.carried(passed, self._every)))
        if passed < ballot.candidate:
            return False
        # In this order. What is not chosen when it is marked never will be, so what is whole after that stays so. The
        # other way round it might be chosen after the look, and written over, and the next one chosen before the mark.
        stays = self._marks.keeps(ballot.candidate)
        presence = self._look(ballot.candidate)
        if presence is Presence.COMING:
            return False
        if presence is Presence.WHOLE and stays:
            return self._join(board, key, ballot.candidate)
        return self._raise(board, key, ballot, passed)

    def _join(self, board: Board, key: str, candidate: int) -> bool:
        faults.point("engine.agreement.join")
        self._joined, self._count = candidate, None
        self._count = board.add(f"{key}/{candidate}")
        faults.point("engine.agreement.joined")
        return True

    def _raise(self, board: Board, key: str, ballot: Ballot, passed: int) -> bool:
        faults.point("engine.agreement.raise")
        return self._ask(board, key, str(ballot), str(ballot.raised(passed, self._every, is_late=self._is_late)))

    def _ask(self, board: Board, key: str, expected: str, desired: str) -> bool:
        answer = board.swap(key, expected, desired)
        if answer == "?":  # TCPStore's answer where the word is not there: the store lost it
            return False
        faults.point("engine.agreement.learn")
        told, before = Ballot.of(answer), self._ballot
        self._ballot = told
        self._marks.learn(told)
        if before is None or told.candidate != before.candidate:
            self._is_late = self.passed is not None and self.passed >= told.candidate
        # Who was counted after the one that changed the word has deleted the counter has made it anew.
        is_ours = before is not None and (answer == desired or before.candidate == self._joined)
        if before is not None and is_ours and told.candidate > before.candidate:
            board.forget(f"{key}/{before.candidate}")
        return told != before
