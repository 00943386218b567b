"""Turns the states of a keeper into counters and messages, by comparing each state with the previous one."""

import socket
from collections.abc import Sequence

from msgspec import structs

from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import KeeperAlert, KeeperState, LevelState, StepKey
from lazysnap.engine.messages import MessageKind, Messages

_REMEMBERED = 1024
"""Complete steps of one level that are remembered, so that no step is counted twice."""
_ALERTS = {"links": MessageKind.UNLINKED, "protection": MessageKind.NODE_UNPROTECTED}
"""Alerts that are reported again while they last, and once when they end."""


class KeeperEvents:
    """Follows keeper and levels. Every occurrence is counted; a problem is reported once until it ends.

    Used on the training thread. Keeps only the last state of the keeper and the steps that it counted.
    """

    def __init__(self, config: SnapshotConfig, messages: Messages, rank: int = 0) -> None:
        self._messages = messages
        self._statistics = messages.statistics
        self._rank = rank
        self._urls = [level.url for level in config.levels]
        self._state = KeeperState()
        self._pid: int | None = None
        """Process id of the keeper; ``None`` without a keeper."""
        self._is_silent = False
        """True if that keeper is alive but does not answer."""
        self._start = 0
        self._counted: list[list[int]] = [[] for _ in self._urls]
        """Counted complete steps of this start, by level, in ascending order."""
        self.lost_names: dict[str, str] = {}
        """Names whose snapshot the first level will never have, with the reason."""

    def begin(self, start: int) -> None:
        """Begin another start. Nothing of it is durable yet."""
        self._start = start
        self._counted = [[] for _ in self._urls]
        self._statistics.last_durable_step.clear()
        self._statistics.last_protected_step = None

    # ---------------------------------------------------------------- comparing

    def compare(self, state: KeeperState, pid: int | None, *, is_silent: bool = False) -> None:
        """Count and report what is new since the last call.

        Args:
            state: the last state that a keeper sent.
            pid: process id of the connected keeper; ``None`` without one.
            is_silent: True if the keeper is alive but does not answer.
        """
        before = self._state
        if state.pid != before.pid:
            before = self._forget_keeper(before)
        if pid not in (None, self._pid):
            before = structs.replace(before, protected=None)  # protected steps count again
        self._compare_connection(pid, is_silent=is_silent)
        if state != before:
            for index, level in enumerate(state.levels[: len(self._urls)]):
                level_before = LevelState()
                if index < len(before.levels):
                    level_before = before.levels[index]
                self._compare_level(index, level_before, level)
            self._compare_protected(before.protected, state.protected)
            self._compare_alerts(before.alerts, state.alerts)
        for alert in state.alerts:
            if alert.about in _ALERTS:
                self._messages.tell_again(_ALERTS[alert.about], text=alert.text)
        self._state = state

    def _forget_keeper(self, state: KeeperState) -> KeeperState:
        """Return the base for the next keeper's state: that keeper counts from zero, and has no alerts."""
        for event in _ALERTS.values():
            self._messages.forget(event)
        return KeeperState(protected=state.protected)

    def _compare_connection(self, pid: int | None, *, is_silent: bool) -> None:
        if self._pid is not None and pid != self._pid:
            self._messages.tell(MessageKind.KEEPER_LOST)
            self._statistics.last_protected_step = None  # its parity is lost; if the keeper is alive, it reports again
        if pid is not None:
            was_silent = self._is_silent
            if pid != self._pid:
                self._messages.forget(MessageKind.KEEPER_LOST)
                self._messages.forget(MessageKind.KEEPER_SILENT)
                was_silent = False
            if is_silent and not was_silent:
                self._messages.tell(MessageKind.KEEPER_SILENT, pid=pid, node=socket.gethostname(), rank=self._rank)
            elif was_silent and not is_silent:
                self._messages.tell_over(MessageKind.KEEPER_SILENT, pid=pid)
        self._pid = pid
        self._is_silent = is_silent

    # ---------------------------------------------------------------- levels

    def _compare_level(self, index: int, before: LevelState, now: LevelState) -> None:
        url = self._urls[index]
        steps = self._count_new(index, now.complete)
        if steps:
            self._messages.tell_over(MessageKind.LEVEL_FAILS, level=url, step=steps[-1])
        self._compare_failure(url, before, now)

    def _compare_failure(self, url: str, before: LevelState, now: LevelState) -> None:
        num_failed = max(0, now.num_failures - before.num_failures)
        if num_failed:
            self._statistics.level_failures[url] += num_failed
        if now.failure and (num_failed or now.failure != before.failure):
            snapshot = "anything"
            if now.failed_step is not None:
                snapshot = f"step {now.failed_step}"
            text = now.failure.removeprefix(f"{url}: ")
            self._messages.tell(MessageKind.LEVEL_FAILS, level=url, what=snapshot, text=text)

    def _count_new(self, index: int, complete: Sequence[StepKey]) -> list[int]:
        """Count and return the steps that became complete, in ascending order."""
        counted = self._counted[index]
        steps = sorted({key.step for key in complete if key.start == self._start}.difference(counted))
        if len(counted) == _REMEMBERED:
            steps = [step for step in steps if step > counted[0]]
        self._counted[index] = sorted([*counted, *steps])[-_REMEMBERED:]
        if steps:
            url = self._urls[index]
            self._statistics.persisted[url] += len(steps)
            self._statistics.last_durable_step[url] = self._counted[index][-1]
        return steps

    # ---------------------------------------------------------------- the rest

    def _compare_protected(self, before: StepKey | None, now: StepKey | None) -> None:
        if now == before:
            return
        if now is None or now.start != self._start:
            self._statistics.last_protected_step = None
            return
        last = self._statistics.last_protected_step
        if last is None or now.step > last:
            self._statistics.protected += 1
        self._statistics.last_protected_step = now.step

    def lose_name(self, name: str, text: str) -> None:
        """Report a name whose snapshot will never be stored."""
        self._messages.tell(MessageKind.NAME_FAILS, name=name, text=f"no snapshot has it: {text}")
        self.lost_names[name] = text

    def _compare_alerts(self, before: Sequence[KeeperAlert], now: Sequence[KeeperAlert]) -> None:
        for alert in now:
            if alert not in before:
                self._messages.tell(_ALERTS.get(alert.about, MessageKind.KEEPER_TROUBLE), text=alert.text)
        lasting = {alert.about for alert in now}
        for about in {alert.about for alert in before} - lasting:
            if about in _ALERTS:
                self._messages.tell_over(_ALERTS[about])
