"""Threads for reads and writes of blocks. The interpreter does not wait for them when it exits."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Result = TypeVar("Result")


class DaemonPool(Generic[Result]):
    """Runs tasks in at most ``count`` daemon threads. A task is taken, in order, when a thread is free.

    Not ``ThreadPoolExecutor``: the interpreter joins its threads at exit, and one that hangs in a dead file system
    would keep the process alive for ever.
    """

    def __init__(self, count: int, name: str, on_error: Callable[[], None] = lambda: None) -> None:
        """``on_error``: called when a task failed, while others may still run. From any of the threads."""
        self._count = count
        self._name = name
        self._on_error = on_error
        self._feeding = threading.Lock()
        self._results: dict[int, Result] = {}
        self._error: BaseException | None = None

    def run(self, tasks: Iterable[Callable[[], Result]]) -> list[Result]:
        """Results in the order of the tasks. Blocks. Raises: the first error; no task starts after it."""
        feed = enumerate(tasks)
        # The caller is one of the workers: with one thread nothing is started.
        others = [
            threading.Thread(target=self._work, args=(feed,), name=f"{self._name}-{number}", daemon=True)
            for number in range(1, self._count)
        ]
        for thread in others:
            thread.start()
        self._work(feed)
        for thread in others:
            self._await(thread)
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in sorted(self._results)]

    def _await(self, thread: threading.Thread) -> None:
        """Wait for a thread, also after a Ctrl-C, which ends the run: its file must not be closed while it reads."""
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as error:
                if isinstance(self._error, KeyboardInterrupt):
                    raise  # the second one: it hangs
                self._error = error

    def _work(self, feed: "Iterator[tuple[int, Callable[[], Result]]]") -> None:
        while self._error is None:
            try:
                # Taking a task may wait for bytes: results are kept without this lock.
                with self._feeding:
                    item = next(feed, None) if self._error is None else None
                if item is None:
                    return
                self._results[item[0]] = item[1]()
            except BaseException as error:  # noqa: BLE001  handed to the caller
                self._error = self._error or error
                self._on_error()
