"""Tasks in several threads. The interpreter does not wait for them when it exits."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


def in_threads(
    tasks: Iterable[Callable[[], Result]], count: int, name: str, on_error: Callable[[], None] = lambda: None
) -> list[Result]:
    """Run tasks in at most ``count`` threads, the caller's included. Return their results, in order.

    A task is taken, in order, when a thread is free. ``on_error`` is called when a task failed, while others may still
    run, from any of the threads. Not ``ThreadPoolExecutor``: the interpreter joins its threads at exit, and one that
    hangs in a dead file system would keep the process alive for ever.

    Blocks. Raises: the first error; no task starts after it.
    """
    feed, feeding = enumerate(tasks), threading.Lock()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                with feeding:
                    item = next(feed, None) if not errors else None
                if item is None:
                    return
                results[item[0]] = item[1]()
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
                on_error()

    others = [threading.Thread(target=work, name=f"{name}-{number}", daemon=True) for number in range(1, count)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        _join(thread, errors)
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


def _join(thread: threading.Thread, errors: list[BaseException]) -> None:
    """Wait for a thread, also after a Ctrl-C, which ends the run: its file must not be closed while it reads."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            if errors and isinstance(errors[0], KeyboardInterrupt):
                raise  # the second one: it hangs
            errors.insert(0, error)
