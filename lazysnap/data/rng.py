"""State of every random number generator that training may draw from: Python, NumPy, torch, each device."""

import random
import sys
from typing import Any

import torch


def collect_rng() -> dict[str, Any]:
    """The state of all generators of this process. NumPy only if the program imported it; no device is initialised."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators back; devices that are not there any more are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy  # the snapshot's program used it, this one will

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)


def has_drawn(before: dict[str, Any]) -> bool:
    """Whether a generator of Python, NumPy or torch moved since ``collect_rng`` returned ``before``."""
    now = collect_rng()
    if before["python"] != now["python"] or not torch.equal(before["torch"], now["torch"]):
        return True
    return "numpy" in before and bool(before["numpy"][2:] != now["numpy"][2:])  # how far it is in its table
