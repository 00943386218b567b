"""Alerts about trouble that lasts."""

import time
from collections.abc import Callable
from typing import Literal

from lazysnap.events import Alert

_AGAIN_S = 600.0
"""Seconds after which an alert is repeated."""


class Reminder:
    """Sends an alert once trouble has lasted for a while, repeats it, and says when the trouble is over."""

    def __init__(
        self, about: Literal["links", "protection"], after_s: float, emit: Callable[[Alert], None], *, is_open: bool
    ) -> None:
        """``after_s``: seconds of trouble before the first alert. ``is_open``: an earlier keeper may have sent one."""
        self._about: Literal["links", "protection"] = about
        self._after_s, self._emit = after_s, emit
        self._next_s = after_s
        """Seconds of trouble at which the next alert is due."""
        self._is_open = is_open
        """True if trainers may have an alert that was not said to be over."""

    def look(self, lasts_s: float | None, text: Callable[[], str] = str) -> None:
        """Send an alert if one is due. ``lasts_s``: how long the trouble lasts; ``None``: there is none.

        ``text``: called for the text of an alert about trouble. Call this from time to time.
        """
        if lasts_s is None:
            if self._is_open:
                self._emit(Alert(t=time.time(), about=self._about, text=""))
            self._next_s, self._is_open = self._after_s, False
        elif lasts_s >= self._next_s:
            self._next_s, self._is_open = lasts_s + _AGAIN_S, True
            self._emit(Alert(t=time.time(), about=self._about, text=text()))
