"""The position of a data loader in its epoch, as a value for snapshots.

``ResumableLoader`` and the integrations iterate a loader by its position (``Iteration``). ``lazysnap.data.plan``
explains how a restart reaches it again. Then all random generators are restored, so order, augmentation and all other
random numbers continue exactly.

With another number of ranks the loader continues in the same epoch after the samples that were trained, with other
random numbers: see ``lazysnap.data.layout``. ``docs/data.md`` lists what is exact.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lazysnap.data.iteration import Iteration
from lazysnap.data.layout import (
    EpochLayout,
    SubsetDigest,
    changes_in,
    has_other_workers,
    is_first_rank,
    layout_of,
    length_of,
    passed_in,
)
from lazysnap.data.parts import attributes_of, base_of, counts_of, is_iterable, parts_of, set_counts
from lazysnap.data.streams import RandomStreams

logger = logging.getLogger(__name__)


class Position:
    """The position of one loader.

    ``state_dict`` and ``load_state_dict`` make it part of a snapshot; ``iterate`` is the loader's iteration. Not
    thread-safe. It is large because a loader, its samplers, its workers and its iterations have one position.
    """

    is_data_position = True

    def __init__(self, loader: Any, *, is_owned: bool = False) -> None:
        """``is_owned``: the loader references this position, so the position has a weak reference to the loader."""
        self._loader = None if is_owned else loader
        self._owner = weakref.ref(loader) if is_owned else None
        self.streams = RandomStreams()
        """The global random generators, and those of the loader."""
        self._subset_digest = SubsetDigest()
        self._running: weakref.ref[Iteration] | None = None
        self._stepped: dict[str, Any] | None = None
        """Record of the iteration at the last optimizer step, until it ends or another one begins."""
        self._pending: dict[str, Any] | None = None
        """The loaded position, until the loader is iterated."""
        self.skipped = 0
        """Number of batches before the next iteration, if it does not continue a recorded one."""
        self._warned: set[str] = set()
        """Texts that were already logged."""
        self.is_recounted = False
        """True if the batches of the loaded position differ from those at its recording."""
        self.has_other_workers = False
        """True if the loaded position is in an epoch that another number of worker processes read."""
        self.before_fetch: Callable[[], None] | None = None
        """Called before every batch is fetched, when nothing of the next step has begun."""
        self.is_held = False
        """True if the consumer holds one batch that was not trained: the position is then the one before that batch."""
        self._at_boundary: dict[str, Any] | None = None
        """The position at the last boundary that captured nothing, if that was within a loop."""
        self._has_ended = False
        """True if the training is over: a loop that ended early continues at its last boundary."""
        self.at_end: Callable[[], None] | None = None
        """Called when an iteration has given its last batch, before the loop over it ends."""
        self.counted_epochs: Callable[[], dict[str, int]] | None = None
        """Returns the program's own counters of epochs, by name."""

    @property
    def loader(self) -> Any:
        """Return the loader; ``None`` if it no longer exists."""
        if self._owner is not None:
            return self._owner()
        return self._loader

    @property
    def _loaders(self) -> list[Any]:
        """The loader, and the loader of torch inside it."""
        return [self.loader, base_of(self.loader)]

    @property
    def given(self) -> int | None:
        """Return the number of batches that the current iteration has given or skips; ``None`` between iterations."""
        if self._pending is not None:
            return int(self._pending["given"])
        running = self._iteration()
        return None if running is None else running.given

    @property
    def is_iterated(self) -> bool:
        """True if an iterator over the loader exists that has not given its last batch."""
        return self._iteration() is not None

    @property
    def began(self) -> int | None:
        """Return when the current iteration began, by ``iteration.tick``; ``None`` between iterations."""
        running = self._iteration()
        return None if running is None else running.began

    def _iteration(self) -> Iteration | None:
        running = None if self._running is None else self._running()
        if running is None or running.is_over:
            return None
        return running

    def layout(self) -> EpochLayout:
        """Return the current layout of the epoch."""
        loaders = self._loaders
        # Resumed samplers of Accelerate keep the number of processes in a ``state``.
        parts = [*loaders, *parts_of(loaders), attributes_of(self.loader).get("state")]
        dataset = attributes_of(loaders[-1]).get("dataset")
        attributes = [attributes_of(part) for part in parts]
        layout = layout_of(attributes, length_of(self.loader), length_of(dataset))
        layout["subset"] = self._subset_digest.of(dataset)
        return layout

    def counts(self) -> dict[str, Any]:
        """Return counters and seeds of the loader and its samplers."""
        return counts_of(self._loaders)

    def epochs(self) -> dict[str, int]:
        """Return the program's counters of epochs."""
        if self.counted_epochs is None:
            return {}
        return self.counted_epochs()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the current position as plain values: some tens of KB."""
        if self._pending is not None:
            return dict(self._pending)
        if self._has_ended and self._at_boundary is not None:
            return dict(self._at_boundary)
        running = self._iteration()
        if running is not None and running.before is not None:
            return dict(running.before)
        if running is not None:
            return self.state_with(running.record(is_at_end=self._is_at_end(running.given)))
        stepped = self._stepped
        if stepped is None or _has_counted(stepped["epochs"], self.epochs()):
            return self.state_with(None)
        # The loop ended with a break, and the program may continue in this epoch.
        return {**self.state_with(stepped), "was_left": True}

    def state_with(self, record: dict[str, Any] | None) -> dict[str, Any]:
        """Return the position: the record of an iteration (``None``: between two), with the current state of the
        generators and counters.
        """
        if record is None or record["given"] < 2:  # samplers create generators only when they are iterated
            self.streams.watch(self._loaders)
        state = {"given": None, "now": self.streams.collect(), **self.counts(), "layout": self.layout()}
        if record is None:
            return {**state, "skip": self.skipped}
        return {**state, **record, "at_end": self._is_at_end(record["given"])}

    def _is_at_end(self, num_given: int) -> bool:
        """True if the current iteration has given its last batch."""
        if not num_given:
            return False
        # Accelerate's loaders fetch one batch ahead, and know their end also without a length.
        is_end_known = bool(attributes_of(self.loader).get("end_of_dataloader"))
        return is_end_known or num_given == length_of(self.loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at ``state``."""
        set_counts(self._loaders, state)
        if self._iteration() is not None and is_first_rank():
            logger.warning(
                "%s: its position is restored inside a loop over it, which continues as before: restore before the "
                "loop, so that the loop begins at the snapshot",
                type(self._loaders[-1]).__name__,
            )
        self._running = None
        self._stepped = None
        self._at_boundary = None
        self.streams.watch(self._loaders)
        layout = self.layout()
        passed = passed_in(state, layout)
        self._warn_of_changes(state, layout)
        self.is_recounted = passed is not None
        self.has_other_workers = has_other_workers(state, layout)
        self._pending = None
        if passed is not None and state["layout"]["ranks"] != layout["ranks"]:
            self.skipped = passed
            return
        if state["given"] is not None:
            self._pending = self._resolve(state, layout, passed)
            self.skipped = 0
        else:
            self.skipped = state["skip"] if passed is None else passed
        self.streams.restore_owned(state["now"])

    def _warn_of_changes(self, state: dict[str, Any], layout: EpochLayout) -> None:
        base = self._loaders[-1]
        changes = changes_in(state, layout, is_iterable=is_iterable(base))
        if changes and is_first_rank():
            logger.warning("%s: %s", type(base).__name__, "; ".join(changes))

    def _resolve(self, state: dict[str, Any], layout: EpochLayout, passed: int | None) -> dict[str, Any]:
        """Return ``state`` as a position of the current loader.

        ``passed``: the batches that now contain the trained samples, if they differ from before.
        """
        position = dict(state)
        if self.has_other_workers:
            # States of earlier workers fit only the same number of workers.
            position.pop("checkpoint", None)
        if passed is not None:
            position.pop("checkpoint", None)
            position["given"] = passed
            position["layout"] = layout
            # Fetching the first batch draws the order of the epoch, also if it comes next or is fetched ahead.
            if passed == 0 and "at_first" in state:
                position["now"] = state["at_first"]
            elif passed == 1 and "at_first" in state:
                position["ahead"] = state["at_first"]
        return position

    def given_in(self, state: dict[str, Any]) -> int | None:
        """Return the number of batches of this loader before ``state``; ``None`` if it is between two epochs."""
        if state["given"] is None:
            return None
        passed = passed_in(state, self.layout())
        return state["given"] if passed is None else passed

    def skip(self, batches: int) -> None:
        """Let the next iteration begin after ``batches``, unless it continues elsewhere after ``load_state_dict``.

        With none to skip, and the restored epoch or its loop at the end, the next epoch begins, as the caller counts.
        """
        pending = self._pending
        if pending is None:
            self.skipped = batches
            return
        is_done = pending.get("was_left") or pending["given"] == length_of(self.loader)
        if batches == 0 and is_done:
            self._leave_epoch(pending)  # the program may have finished it
        elif batches != pending["given"]:
            logger.warning(
                "the loader continues after batch %d, as restored; %d batches were to be skipped", self.given, batches
            )

    # ---------------------------------------------------------------- steps and boundaries

    def note_step(self) -> None:
        """Record an optimizer step: the current iteration is one of training."""
        self._stepped = None
        running = self._iteration()
        if running is not None:
            running.notes["epochs"] = self.epochs()
            self._stepped = running.record(is_at_end=self._is_at_end(running.given))

    def note_boundary(self) -> None:
        """Record a boundary that captured nothing. A boundary after ``end`` is the last one again."""
        if self._has_ended:
            return
        self._at_boundary = None
        if self._iteration() is not None:
            self._at_boundary = self.state_dict()

    def end(self) -> None:
        """Return to the last boundary: the loop ended since, maybe with an untrained batch."""
        self._has_ended = True

    def note_end(self) -> None:
        """Handle that the current iteration gave its last batch."""
        self._stepped = None
        self._at_boundary = None
        if self.at_end is not None:
            self.at_end()

    def warn_once(self, text: str, of: object) -> None:
        """Log a text about the class of ``of``, unless it was logged before."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, type(of).__name__)

    # ---------------------------------------------------------------- iteration

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return an iteration of the loader, from the start of the epoch or from the loaded position.

        ``make`` makes the loader's own iterator.
        """
        iteration = Iteration(self, make)
        self._resolve_epoch()
        pending = self._pending
        skipped = self.skipped
        self._pending = None
        self._running = weakref.ref(iteration)
        self._stepped = None
        self._at_boundary = None
        self._has_ended = False
        if pending is not None:
            iteration.resume(pending)
            return iteration
        self.skipped = 0
        iteration.begin(min(skipped, length_of(self.loader) or skipped))
        return iteration

    def _resolve_epoch(self) -> None:
        """Decide, when the loader is iterated, which epoch a loaded position belongs to.

        After the last optimizer step of an epoch the program may have counted the next one already. Then the loop that
        it enters now is the one of the next epoch, and the previous one is complete.
        """
        pending = self._pending
        if pending is None or not pending.get("at_end"):
            return
        if _has_counted(pending.get("epochs", {}), self.epochs()):
            self._leave_epoch(pending)

    def _leave_epoch(self, pending: dict[str, Any]) -> None:
        """Let the next iteration begin the epoch after the one that ends at ``pending``."""
        counters = {name: count + 1 for name, count in pending["counters"].items()}
        set_counts(self._loaders, {**pending, "counters": counters})
        self._pending = None


def position_in(state: Mapping[str, Any]) -> str:
    """Describe the first position of a loader in a training state; empty if none is within an epoch."""
    for value in state.values():
        if isinstance(value, dict) and isinstance(value.get("given"), int) and "at_iter" in value:
            counters = value["counters"]
            epoch = counters.get("iteration", counters.get("_num_iter_calls"))
            return f"batch {value['given']}" if epoch is None else f"epoch {epoch}, batch {value['given']}"
    return ""


def _has_counted(before: dict[str, int], now: dict[str, int]) -> bool:
    """True if a counter in ``before`` is greater by one in ``now``."""
    return any(now.get(name) == count + 1 for name, count in before.items())
