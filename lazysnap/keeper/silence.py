"""Does the keeper still answer? It sends nothing while nothing changes, so it is asked now and then. Pure."""

_TURN_S = 0.25
_LEAST_S = 3.0
"""A keeper on a busy machine misses a second."""


class Silence:
    """The time for which a keeper sent nothing."""

    def __init__(self, io_timeout_s: float) -> None:
        self._patience_s = max(_LEAST_S, io_timeout_s)
        self._quiet_s = 0.0
        """Seconds since the last message."""
        self._is_answer_due = False

    @property
    def is_silent(self) -> bool:
        """True if an answer is due, and nothing came for too long."""
        return self._is_answer_due and self._quiet_s >= self._patience_s

    @property
    def is_question_due(self) -> bool:
        """True if nothing came for half of that time, and nothing was asked since."""
        return not self._is_answer_due and self._quiet_s >= self._patience_s / 2

    def expect_answer(self) -> None:
        """The keeper was asked, or is to take a message."""
        self._is_answer_due = True

    def wait_s(self) -> float:
        """Return the seconds after which ``waited`` is to be called."""
        if self._is_answer_due:
            return _TURN_S
        return self._patience_s / 2 - self._quiet_s

    def waited(self, seconds: float, *, is_answered: bool) -> None:
        """Count the time that passed.

        While an answer is due, it is counted in short turns: after this process was stopped, or the whole machine, its
        clock says nothing of the keeper.
        """
        if is_answered:
            self._quiet_s = 0.0
            self._is_answer_due = False
        elif self._is_answer_due:
            self._quiet_s += min(seconds, _TURN_S)
        else:
            self._quiet_s = min(self._quiet_s + seconds, self._patience_s / 2)
