"""Reports to the user whether captures go into memory that outlives the training process."""

from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.engine.statistics import NO_MEMORY


class Protection:
    """Protection of this training. Used on the training thread.

    PROTECTED (``cause`` is ``None``) -> UNPROTECTED (``lose``) -> PROTECTED again.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._statistics = messages.statistics
        self.cause: str | None = None
        """The reason why memory is unavailable; ``None`` if it is available or not known yet. Stays until the next
        capture begins.
        """
        self._last = ""
        """The last cause, for the message at the end."""

    def lose(self, cause: str, *, is_reported: bool = False) -> None:
        """Become UNPROTECTED. Warns, unless that was already reported.

        Args:
            cause: the reason why memory is unavailable.
            is_reported: True if training ends with an error that contains the cause.
        """
        is_new = self.cause is None
        self.cause = cause
        self._last = cause
        if is_new and not is_reported:
            self._messages.tell(MessageKind.NO_MEMORY, text=cause, lost=self.what_is_lost())

    def regain(self) -> None:
        """Become PROTECTED: captures go into memory again."""
        self.cause = None
        self._messages.tell_over(MessageKind.NO_MEMORY)

    def remind(self) -> None:
        """Repeat the warning, rarely, while training continues without memory. Called at a boundary."""
        self._messages.tell_again(MessageKind.NO_MEMORY, text=self.cause, lost=self.what_is_lost())

    def sum_up(self) -> None:
        """Report the steps that were not protected, if any. Called at the end."""
        count = self._statistics.skipped[NO_MEMORY]
        if not count:
            return
        durable = [f"{url}: step {step}" for url, step in self._statistics.last_durable_step.items()]
        stored = ", ".join(durable) or "none"
        plural = "s" * (count != 1)
        self._messages.tell(MessageKind.STEPS_WITHOUT_MEMORY, count=count, s=plural, text=self._last, stored=stored)

    def what_is_lost(self) -> str:
        """Return, for a message, what a crash loses while memory is unavailable."""
        newest = max(self._statistics.last_durable_step.values(), default=None)
        since = "the beginning of this training"
        if newest is not None:
            since = f"step {newest}, the newest one on storage"
        return f"nothing is captured, so nothing is stored: a crash loses every step since {since}"
