"""Tasks in several threads. The interpreter does not wait for them when it exits."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


def in_threads(
    tasks: Iterable[Callable[[], Result]], count: int, name: str, on_error: Callable[[], None] | None = None
) -> list[Result]:
    """Run tasks in at most ``count`` threads, the caller's included. Return their results, in order.

    A task is taken, in order, when a thread is free. Not ``ThreadPoolExecutor``: the interpreter joins its threads at
    exit, and one that hangs in a dead file system would keep the process alive for ever.

    Blocks. Raises: the first error; no task starts after it.

    Args:
        tasks: the functions to call.
        count: the number of threads.
        name: the beginning of the names of the threads.
        on_error: called in the thread in which a task failed. Other tasks may still run.
    """
    queue = enumerate(tasks)
    queue_lock = threading.Lock()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                with queue_lock:
                    if errors:
                        return
                    numbered_task = next(queue, None)
                if numbered_task is None:
                    return
                index, task = numbered_task
                results[index] = task()
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
                if on_error is not None:
                    on_error()

    threads = []
    for number in range(1, count):
        thread = threading.Thread(target=work, name=f"{name}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit of threads: the running ones do the work
            break
        threads.append(thread)
    work()
    for thread in threads:
        _join(thread, errors)
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


def _join(thread: threading.Thread, errors: list[BaseException]) -> None:
    """Wait for a thread, also after a Ctrl-C: its file must not be closed while it reads."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            if errors and isinstance(errors[0], KeyboardInterrupt):
                raise  # the second Ctrl-C: the thread hangs
            errors.insert(0, error)
