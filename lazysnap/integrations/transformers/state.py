"""The whole state of a ``Trainer`` between two optimizer steps.

For a subclass of ``Trainer`` (as in TRL) the state also has attributes that are numbers, or dicts and lists of numbers,
and that changed since training began: counters, and metrics until the next log.

Not in a snapshot: attributes of callbacks that are no ``ExportableState``; averages of the weights in a callback; other
attributes of subclasses.
"""

import json
import logging
import time
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from lazysnap.data import Position
from lazysnap.data.streams import restore_rng
from lazysnap.errors import FormatError, StateError
from lazysnap.state.codec import decode, encode, is_known, path_text
from lazysnap.state.objects import RNG, ObjectState
from lazysnap.state.scalars import convert_items

logger = logging.getLogger(__name__)

_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of ``TrainerState`` that training changes. The program determines all others."""
_COUNTERS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
"""Attributes of ``Trainer`` that training changes."""
_OF_A_SESSION = {*_COUNTERS, "_initial_num_input_tokens_seen", "current_gradient_accumulation_steps"}
"""Numbers of ``Trainer`` itself that a restart does not need, or that are restored separately."""
_MAX_NUMBERS = 1000
"""Maximum numbers in a captured attribute."""
_COMPLETIONS = "_buffered_inputs"
"""Attribute of TRL's GRPO and RLOO trainers: batches of completions for several steps."""


class TrainingState(ObjectState):
    """The ``StateSource`` of one call of ``Trainer.train``."""

    clocks = ("trainer.seconds",)

    def __init__(self, trainer: Any) -> None:
        super().__init__({})
        self._trainer = trainer
        self.position: Position | None = None
        """The position of the loader of training data."""
        self.epoch = 0
        self._resumed: dict[str, Any] | None = None
        """A restored state that waits for its step boundary."""
        self.position_text = ""
        """The position of the restored state in the data, in words."""
        self.end_reason = ""
        """The reason why nothing is left to train after the restored state; empty if something is left."""
        self._history = History()
        self._is_at_epoch_end = False
        self._completions_reported = False
        self._numbers_at_start: dict[str, str] = {}
        self.began_s = time.time()
        self.earlier_s = 0.0
        """Seconds of training before the restart."""

    def is_finished(self) -> bool:
        """See ``StateSource.is_finished``."""
        return bool(self.end_reason)

    def begin(self) -> None:
        """Begin a training that has a model. The snapshot is read before an optimizer exists."""
        self.began_s = time.time()
        self._objects["model"] = self._trainer.model

    def prepare(self) -> None:
        """Add model, optimizer and scheduler as training uses them."""
        trainer = self._trainer
        # With several ranks the wrapper shows which parameters are equal. DataParallel does not, and would change the
        # names.
        if not isinstance(trainer.model_wrapped, torch.nn.DataParallel):
            self._objects["model"] = trainer.model_wrapped
        self._objects |= {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "data": self.position}
        if trainer.accelerator.scaler is not None:
            self._objects["scaler"] = trainer.accelerator.scaler
        self._numbers_at_start = {name: repr(value) for name, value in self._numbers().items()}

    def collect(self) -> dict[str, Any]:
        """See ``StateSource.collect``."""
        trainer = self._trainer
        changed_numbers = {}
        for name, value in self._numbers().items():
            if repr(value) != self._numbers_at_start.get(name):
                changed_numbers[name] = value
        state = super().collect()
        state["trainer"] = {
            "state": {name: getattr(trainer.state, name) for name in _STATE},
            "history": self._history.text(trainer.state.log_history),
            "exported": dict(trainer.state.stateful_callbacks),
            "control": vars(trainer.control).copy(),
            "callbacks": [[type(callback).__name__, callback.state()] for callback in self._exportable()],
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "numbers": changed_numbers,
            "loss": trainer._tr_loss,
            "completions": self._completions(),
            "epoch": self.epoch,
            "seconds": time.time() - self.began_s + self.earlier_s,
        }
        return state

    def _exportable(self) -> list[Any]:
        """Return the callbacks that have a state."""
        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]

    def _numbers(self) -> dict[str, Any]:
        """Return the counters of the trainer's own class."""
        numbers: dict[str, Any] = {}
        if type(self._trainer) is Trainer:
            return numbers
        for name, value in vars(self._trainer).items():
            if name not in _OF_A_SESSION and _are_numbers(value):
                numbers[name] = value
        return numbers

    def _completions(self) -> Any:
        """Return the batches that TRL's online trainers (GRPO, RLOO) generated for the next steps, if any."""
        completions = getattr(self._trainer, _COMPLETIONS, None)
        if completions is None or is_known(completions):
            return completions
        if not self._completions_reported:
            self._completions_reported = True
            logger.warning(
                "%s.%s holds values of types that no snapshot can hold: after a restart between two generations the "
                "completions are generated again, so the restart is not exact; lazysnap.register_type(...) adds a type",
                type(self._trainer).__qualname__,
                _COMPLETIONS,
            )
        return None

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """See ``StateSource.load``. Values that the ``Trainer`` sets after this call wait for ``finish_resume``.

        Raises: StateError, if it is the state of another kind of training.
        """
        if self._is_at_epoch_end:  # the next iteration begins an epoch
            state = {**state, "data": {**state["data"], "given": None, "skip": 0}}
        super().load(state, data=data)

    # ---------------------------------------------------------------- a restart

    @property
    def is_resuming(self) -> bool:
        """True if a restored state waits for its step boundary."""
        return self._resumed is not None

    def accept(self, state: dict[str, Any]) -> None:
        """Accept a collected state for a restart.

        Restores the counters of ``TrainerState``, so that callbacks see them when training begins. The rest waits for
        ``load`` and ``finish_resume``. Raises: StateError, if it was not collected from a ``Trainer``.
        """
        if "trainer" not in state or "data" not in state:
            raise StateError(
                f"the snapshot was not taken from a Trainer: it holds {', '.join(sorted(state))}; give this training a "
                "dirpath of its own"
            )
        self._resumed = state
        self.earlier_s = state["trainer"]["seconds"]
        self._restore_state(state["trainer"])
        self.end_reason = self._reason_of_end(state["trainer"])

    def _restore_state(self, parts: dict[str, Any]) -> None:
        state = self._trainer.state
        for name, value in parts["state"].items():
            setattr(state, name, value)
        state.log_history = _read_history(parts["history"])
        state.stateful_callbacks = {**state.stateful_callbacks, **parts["exported"]}

    def start_position(self, steps_in_epoch: int) -> tuple[int, int]:
        """Return the epoch in which the restored state continues, and the number of its batches that were trained."""
        assert self._resumed is not None
        assert self.position is not None
        epoch = self._resumed["trainer"]["epoch"]
        num_batches = self.position.given_in(self._resumed["data"])  # in batches of this program
        if num_batches is None:
            num_batches = 0
            num_steps = steps_in_epoch
        else:
            # The last step of an epoch may have fewer batches.
            num_steps = -(-num_batches // self._trainer.args.gradient_accumulation_steps)
        self._is_at_epoch_end = num_steps >= steps_in_epoch
        if self._is_at_epoch_end:
            epoch += 1
            num_batches = 0
        self.position_text = f"epoch {epoch}, batch {num_batches}"
        return epoch, num_batches

    def _reason_of_end(self, parts: dict[str, Any]) -> str:
        limit = self._trainer.state.max_steps
        step = parts["state"]["global_step"]
        if step >= limit:
            arguments = self._trainer.args
            setting = f"num_train_epochs={arguments.num_train_epochs:g}, {limit} steps"
            if arguments.max_steps > 0:
                setting = f"max_steps={limit}"
            return (
                f"this training had ended ({setting}, at step {step}): raise that limit to continue, or begin fresh in "
                'another directory or without resume_from_checkpoint="latest"'
            )
        # Any other stop (a signal, a time limit) is an interruption: if its reason remains, it stops again.
        matched, _ = self._matched(parts["callbacks"])
        if any(_has_run_out(exported) for _, exported in matched):
            return (
                f"EarlyStoppingCallback had stopped it, after step {step} of {limit}; to continue anyway, leave "
                "that callback out"
            )
        return ""

    def _matched(self, exported: list[list[Any]]) -> tuple[list[tuple[Any, dict[str, Any]]], list[str]]:
        """Return the program's callbacks with their states in the snapshot, and the names of missing callbacks."""
        matched = []
        unmatched = list(exported)
        for callback in self._exportable():
            for entry in unmatched:
                name, state = entry
                if name == type(callback).__name__:
                    unmatched.remove(entry)
                    matched.append((callback, state))
                    break
        return matched, [name for name, _ in unmatched]

    def finish_resume(self) -> None:
        """Restore the values that the ``Trainer`` and callbacks set when training begins; random generators last."""
        resumed = self._resumed
        self._resumed = None
        assert resumed is not None
        trainer = self._trainer
        parts = resumed["trainer"]
        self._restore_state(parts)
        for name, value in {**parts["counters"], **parts["numbers"]}.items():
            setattr(trainer, name, value)
        trainer._tr_loss.copy_(parts["loss"])
        if parts["completions"] is not None:
            setattr(trainer, _COMPLETIONS, _copied_to(parts["completions"], trainer.args.device))
        for name, value in parts["control"].items():
            setattr(trainer.control, name, value)
        if not self.end_reason:
            trainer.control.should_training_stop = False  # the limit was raised
        matched, unmatched_names = self._matched(parts["callbacks"])
        for callback, exported in matched:
            _restore(callback, exported)
        if unmatched_names and trainer.is_world_process_zero():
            logger.warning(
                "the snapshot has the state of %s, which this Trainer does not have: that state is dropped",
                " and ".join(unmatched_names),
            )
        restore_rng(resumed[RNG])


def _are_numbers(value: Any) -> bool:
    """True for a number, and for a dict or list of numbers that is not large."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return len(value) <= _MAX_NUMBERS and all(map(_are_numbers, value))
    return type(value) in (int, float)


def _has_run_out(exported: dict[str, Any]) -> bool:
    """True for the state of an ``EarlyStoppingCallback`` that has stopped the training."""
    patience = exported.get("args", {}).get("early_stopping_patience")
    count = exported.get("attributes", {}).get("early_stopping_patience_counter")
    return patience is not None and count is not None and count >= patience


def _restore(callback: Any, exported: dict[str, Any]) -> None:
    """Load the state of a callback in place, unlike ``from_state``: the program may hold the callback."""
    for name, value in exported.get("args", {}).items():
        if hasattr(callback, name):
            setattr(callback, name, value)
    for name, value in exported.get("attributes", {}).items():
        setattr(callback, name, value)


class History:
    """The log as text. The log grows with the training, so each snapshot adds only the new entries."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._last_entry: Any = None

    def text(self, entries: list[dict[str, Any]]) -> str:
        """Return one line of JSON for each entry, as it was when it was logged.

        A tensor is stored as a number, or as a list of numbers. Blocks once for each logged tensor on a device.
        """
        num_lines = len(self._lines)
        if num_lines and (num_lines > len(entries) or entries[num_lines - 1] is not self._last_entry):
            self._lines = []  # the program replaced the log
        for entry in entries[len(self._lines) :]:
            numbers = _without_tensors(entry)
            self._lines.append(json.dumps(encode(numbers, tensor=_refuse)))
        self._last_entry = None
        if entries:
            self._last_entry = entries[-1]
        return "\n".join(self._lines)


def _read_history(text: str) -> list[dict[str, Any]]:
    """Return the entries of a ``History.text``. Raises: FormatError."""
    return [decode(json.loads(line), tensor=_no_tensor) for line in text.split("\n") if line]


def _without_tensors(value: Any) -> Any:
    return _with_tensors_replaced(value, methodcaller("tolist"))


def _copied_to(value: Any, device: torch.device) -> Any:
    return _with_tensors_replaced(value, methodcaller("to", device, copy=True))


def _with_tensors_replaced(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which each tensor is replaced."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    return convert_items(value, _with_tensors_replaced, replace)


def _refuse(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
    raise StateError(f"a tensor is logged within {path_text(path)}: log numbers instead, such as its item()")


def _no_tensor(name: str) -> torch.Tensor:
    raise FormatError(f"the log holds a tensor {name!r}, which no snapshot has there")
