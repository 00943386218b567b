"""The step boundary of a Lightning fit: replaced methods of its loops.

The boundary of step k is just before the batches of step k + 1 are fetched: step k is complete, and the next one has
not begun.
"""

from collections.abc import Callable
from typing import Any

from lazysnap.integrations.frameworks import Patches
from lazysnap.integrations.lightning.loops import ended_within_epoch
from lazysnap.integrations.lightning.state import LightningState


class FitBoundaries:
    """The boundaries of one fit. Each method replaces a method of a loop, and receives the original."""

    def __init__(
        self,
        trainer: Any,
        state: LightningState,
        *,
        gate: Callable[[], None],
        capture: Callable[..., None],
        roll_back: Callable[[Any], None],
    ) -> None:
        """Nothing is replaced yet.

        Args:
            trainer: the trainer of the fit.
            state: its state.
            gate: waits until weights may change again.
            capture: captures the completed step; with ``is_last``, the last one of the fit.
            roll_back: rolls back, if the program requested it.
        """
        self._trainer = trainer
        self._state = state
        self._gate = gate
        self._capture = capture
        self._roll_back = roll_back

    def install(self, patches: Patches) -> None:
        """Replace the methods of the loops."""
        fit_loop = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        patches.replace(fit_loop, "_load_combined_loader_states", self._before_loaders)
        patches.replace(fit_loop, "run", self._run)
        patches.replace(fit_loop, "on_advance_start", self._before_epoch)
        patches.replace(epoch_loop, "on_run_start", self._start_epoch)
        patches.replace(epoch_loop, "_on_before_fetch", self._before_fetch)
        patches.replace(epoch_loop, "on_advance_end", self._end_batch)
        patches.replace(epoch_loop.val_loop, "run", self._gated)
        patches.replace(fit_loop, "on_advance_end", self._end_epoch)
        patches.replace(fit_loop, "on_run_end", self._end_run)

    # In the order of a fit

    def _before_loaders(self, original: Callable[[], Any]) -> None:
        # A restart takes positions from the snapshot; Lightning drops them if loaders are set up early.
        if not self._state.is_resuming:
            original()
        self._state.prepare_loaders()

    def _run(self, original: Callable[[], Any]) -> None:
        original()
        if self._state.is_finished():
            self._state.put_averages_into_model()

    def _before_epoch(self, original: Callable[[], Any]) -> None:
        self._gate()
        if self._state.is_resuming and not self._state.resumes_in_epoch:
            self._state.finish_resume()
        original()

    def _start_epoch(self, original: Callable[[Any], Any], fetcher: Any) -> None:
        self._state.watch_loaders()
        original(fetcher)
        if self._state.is_resuming:
            self._state.finish_resume()

    def _before_fetch(self, original: Callable[[], Any]) -> None:
        fetcher = self._trainer.fit_loop._data_fetcher
        # Inside iter() a loader without length fetches one batch ahead: no batch of the epoch is counted yet.
        if fetcher.length is not None or fetcher.fetched:
            self._capture()
        original()

    def _end_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._roll_back(self._trainer)  # a hook after the callback's own may have requested it
        return original(*args, **kwargs)

    def _gated(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._gate()
        return original(*args, **kwargs)

    def _end_epoch(self, original: Callable[[], Any]) -> None:
        self._gate()
        if ended_within_epoch(self._trainer):
            # Before the epoch is counted: a fit with a higher `max_steps` continues within it.
            self._capture(is_last=True)
        original()

    def _end_run(self, original: Callable[[], Any]) -> None:
        self._gate()
        # Before hooks at the end of training swap weights (averages): a later fit must continue from these.
        self._capture(is_last=True)
        original()
