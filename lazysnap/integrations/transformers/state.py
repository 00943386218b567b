"""The whole state of a ``Trainer`` between two optimizer steps, and how it is put back.

Of a subclass of ``Trainer`` (as TRL has them) also the attributes that are numbers, or dicts and lists of numbers, and
that changed since training began: counters, and metrics until the next log.

Not in a snapshot: attributes of callbacks that are no ``ExportableState``; averages of the weights that a callback
keeps for itself; other attributes of subclasses.
"""

import json
import logging
import time
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from lazysnap.data import Position
from lazysnap.data.streams import restore_rng
from lazysnap.errors import FormatError, StateError
from lazysnap.state.codec import decode, encode, is_known, path_text
from lazysnap.state.objects import ObjectState

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
"""Fields of ``TrainerState`` that training changes; all others follow from the program."""
_COUNTERS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
"""Attributes of ``Trainer`` that training changes."""
_OF_A_SESSION = {*_COUNTERS, "_initial_num_input_tokens_seen", "current_gradient_accumulation_steps"}
"""Numbers of ``Trainer`` itself that a restart needs not, or that are restored by name."""
_MOST_NUMBERS = 1000
_COMPLETIONS = "_buffered_inputs"
"""Attribute of TRL's GRPO and RLOO trainers: batches of completions that several steps train."""


class TrainingState(ObjectState):
    """The ``StateSource`` of one call of ``Trainer.train``."""

    clocks = ("trainer.seconds",)

    def __init__(self, trainer: Any) -> None:
        super().__init__({})
        self._trainer = trainer
        self.position: Position | None = None
        """The position of the loader of training data."""
        self.epoch = 0
        self.landing: dict[str, Any] | None = None
        """A restored state that still waits for the point where it was collected."""
        self.position_text = ""
        """The position of the restored state in the data, in words."""
        self.end_reason = ""
        """Why nothing is left to train of the restored state; empty, if something is."""
        self._history = History()
        self._is_at_epoch_end = False
        self._completions_reported = False
        self._numbers_at_start: dict[str, str] = {}
        self.began_s = time.time()
        self.earlier_s = 0.0
        """Seconds of training before the restart."""

    def begin(self) -> None:
        """Training begins: the model is there. A snapshot is looked for before there is an optimizer."""
        self.began_s = time.time()
        self._objects["model"] = self._trainer.model

    def prepare(self) -> None:
        """Model, optimizer and scheduler are there now, as training uses them."""
        trainer = self._trainer
        # With several ranks the wrapper shows which parameters they keep equal. DataParallel shows nothing, and
        # would change the names.
        if not isinstance(trainer.model_wrapped, torch.nn.DataParallel):
            self._objects["model"] = trainer.model_wrapped
        self._objects |= {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "data": self.position}
        if trainer.accelerator.scaler is not None:
            self._objects["scaler"] = trainer.accelerator.scaler
        self._numbers_at_start = {name: repr(value) for name, value in self._numbers().items()}

    def collect(self) -> dict[str, Any]:
        """See ``StateSource.collect``."""
        trainer, position = self._trainer, self.position
        assert position is not None
        state = super().collect()
        state["trainer"] = {
            "state": {name: getattr(trainer.state, name) for name in _STATE},
            "history": self._history.text(trainer.state.log_history),
            "exported": dict(trainer.state.stateful_callbacks),
            "control": vars(trainer.control).copy(),
            "callbacks": [[type(item).__name__, item.state()] for item in self._stateful()],
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "numbers": {
                name: value
                for name, value in self._numbers().items()
                if repr(value) != self._numbers_at_start.get(name)
            },
            "loss": trainer._tr_loss,
            "completions": self._completions(),
            "epoch": self.epoch,
            "given": position.given,
            "seconds": time.time() - self.began_s + self.earlier_s,
        }
        return state

    def _stateful(self) -> list[Any]:
        return [item for item in self._trainer.callback_handler.callbacks if isinstance(item, ExportableState)]

    def _numbers(self) -> dict[str, Any]:
        """Counters of the trainer's own class."""
        trainer = self._trainer
        if type(trainer) is Trainer:
            return {}
        found = {name: value for name, value in vars(trainer).items() if name not in _OF_A_SESSION}
        return {name: value for name, value in found.items() if _are_numbers(value)}

    def _completions(self) -> Any:
        """Return what TRL's online trainers (GRPO, RLOO) generated for the steps to come; ``None`` without it."""
        completions = getattr(self._trainer, _COMPLETIONS, None)
        if completions is None or is_known(completions):
            return completions
        if not self._completions_reported:
            self._completions_reported = True
            logger.warning(
                "%s.%s holds values of types that no snapshot can hold: after a restart between two generations the "
                "completions are generated anew, so the restart is not exact; lazysnap.register_type(...) adds a type",
                type(self._trainer).__qualname__,
                _COMPLETIONS,
            )
        return None

    def load(self, state: dict[str, Any], *, data: bool = True) -> None:
        """See ``StateSource.load``; what the ``Trainer`` sets anew after this waits for ``land``.

        Raises: StateError, if it is the state of another kind of training.
        """
        if self._is_at_epoch_end:  # the next iteration begins an epoch
            state = {**state, "data": {**state["data"], "given": None, "skip": 0}}
        super().load(state, data=data)

    # ---------------------------------------------------------------- a restart

    def admit(self, state: dict[str, Any]) -> None:
        """Take over the counters of ``TrainerState``, so that callbacks see them when training begins; the rest follows
        in ``load`` and ``land``. Raises: StateError, if it was not taken from a ``Trainer``.
        """
        if "trainer" not in state or "data" not in state:
            raise StateError(
                f"the snapshot was not taken from a Trainer: it holds {', '.join(sorted(state))}; give this training a "
                "dirpath of its own"
            )
        self.landing, self.earlier_s = state, state["trainer"]["seconds"]
        self._restore_state(state["trainer"])
        self.end_reason = self._reason()
        self.has_ended = bool(self.end_reason)

    def _restore_state(self, parts: dict[str, Any]) -> None:
        state = self._trainer.state
        for name, value in parts["state"].items():
            setattr(state, name, value)
        state.log_history = _read_history(parts["history"])
        state.stateful_callbacks = {**state.stateful_callbacks, **parts["exported"]}

    def where(self, steps_in_epoch: int) -> tuple[int, int]:
        """The epoch in which the restored state goes on, and the batches of it that were trained."""
        assert self.landing is not None
        epoch, given = self.landing["trainer"]["epoch"], self.landing["trainer"]["given"]
        if given is not None and self.position is not None:
            given = self.position.given_in(self.landing["data"])  # batches as this program makes them
        # The last step of an epoch may have fewer batches.
        steps = steps_in_epoch if given is None else -(-given // self._trainer.args.gradient_accumulation_steps)
        self._is_at_epoch_end = steps >= steps_in_epoch
        epoch, batches = (epoch + 1, 0) if self._is_at_epoch_end else (epoch, given or 0)
        self.position_text = f"epoch {epoch}, batch {batches}"
        return epoch, batches

    def _reason(self) -> str:
        assert self.landing is not None
        parts, limit = self.landing["trainer"], self._trainer.state.max_steps
        step = parts["state"]["global_step"]
        if step >= limit:
            arguments = self._trainer.args
            setting = f"num_train_epochs={arguments.num_train_epochs:g}, {limit} steps"
            if arguments.max_steps > 0:
                setting = f"max_steps={limit}"
            return f"this training had ended ({setting}, at step {step})"
        # Any other stop (a signal, a limit of time) is an interruption: if its reason still holds, it stops again.
        if any(_has_run_out(exported) for _, exported in self._matched(parts["callbacks"])[0]):
            return (
                f"EarlyStoppingCallback had stopped it, after step {step} of {limit}; to go on all the same, leave "
                "that callback out"
            )
        return ""

    def _matched(self, exported: list[list[Any]]) -> tuple[list[tuple[Any, dict[str, Any]]], list[str]]:
        """Return the program's callbacks with their states in the snapshot, and the names of those it does not have."""
        left, found = list(exported), []
        for item in self._stateful():
            known = next((pair for pair in left if pair[0] == type(item).__name__), None)
            if known is not None:
                left.remove(known)
                found.append((item, known[1]))
        return found, [name for name, _ in left]

    def land(self) -> None:
        """Put back what the ``Trainer`` and callbacks set when training begins, last of all the random generators."""
        landing, self.landing = self.landing, None
        assert landing is not None
        trainer, parts = self._trainer, landing["trainer"]
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
        found, unknown = self._matched(parts["callbacks"])
        for item, exported in found:
            _restore(item, exported)
        if unknown and trainer.is_world_process_zero():
            logger.warning(
                "the snapshot has the state of %s, which this Trainer does not have: that state is dropped",
                " and ".join(unknown),
            )
        restore_rng(landing["rng"])


def _are_numbers(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        items = [*value.values()] if isinstance(value, dict) else value
        return len(items) <= _MOST_NUMBERS and all(map(_are_numbers, items))
    return type(value) in (int, float)


def _has_run_out(exported: dict[str, Any]) -> bool:
    """True for the state of an ``EarlyStoppingCallback`` that has stopped the training."""
    patience = exported.get("args", {}).get("early_stopping_patience")
    count = exported.get("attributes", {}).get("early_stopping_patience_counter")
    return patience is not None and count is not None and count >= patience


def _restore(item: Any, exported: dict[str, Any]) -> None:
    """Load in place, unlike ``from_state``: the program may hold the callback."""
    for name, value in exported.get("args", {}).items():
        if hasattr(item, name):
            setattr(item, name, value)
    for name, value in exported.get("attributes", {}).items():
        setattr(item, name, value)


class History:
    """The log, which grows with the training, as text: each snapshot adds only what is new."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._last: Any = None

    def text(self, entries: list[dict[str, Any]]) -> str:
        """Return one line of JSON for each entry, as it was when it was logged.

        A tensor is stored as a number, or as a list of numbers. Blocks once for each logged tensor on a device.
        """
        known = len(self._lines)
        if known and (known > len(entries) or entries[known - 1] is not self._last):
            self._lines, known = [], 0
        for entry in entries[known:]:
            numbers = _without_tensors(entry)
            self._lines.append(json.dumps(encode(numbers, tensor=_refuse)))
        self._last = entries[-1] if entries else None
        return "\n".join(self._lines)


def _read_history(text: str) -> list[dict[str, Any]]:
    """The entries of a ``text``. Raises: FormatError."""
    return [decode(json.loads(line), tensor=_no_tensor) for line in text.split("\n") if line]


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if type(value) is dict:
        return {key: _without_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item) for item in value)
    return value


def _copied_to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if type(value) is dict:
        return {key: _copied_to(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied_to(item, device) for item in value)
    return value


def _refuse(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
    raise StateError(f"a tensor is logged within {path_text(path)}: log numbers instead, such as its item()")


def _no_tensor(name: str) -> torch.Tensor:
    raise FormatError(f"the log holds a tensor {name!r}, which no snapshot has there")
