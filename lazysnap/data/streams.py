"""The random generators of a training: the global ones and those of data loaders."""

import array
import ctypes
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from lazysnap.data.generators import GeneratorSearch

NOT_SEARCHED = (
    "%s: its dataset has so many parts that not all were searched for random generators: those deep inside are in no "
    "snapshot, and what they draw (augmentation) is not resumed exactly; keep the generator in an attribute of the "
    "dataset itself"
)
HOST_GENERATORS = {"python", "numpy", "torch"}
"""Global generators of the host; those of devices are named by device type."""


def _accelerator() -> tuple[str, Any]:
    """Return the type of device that this process computes on, and torch's module for it; empty and ``None`` without
    one.
    """
    if not torch.accelerator.is_available():
        return "", None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return "", None
    return device.type, torch.get_device_module(device)


def collect_rng() -> dict[str, Any]:
    """Return the state of all generators of this process.

    NumPy is included only if the program imported it. No device is initialised.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    kind, module = _accelerator()
    if module is not None and module.is_initialized():
        state[kind] = [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the generators; states of missing devices are skipped."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy  # the program of the snapshot used it, so this one will

        numpy.random.set_state(state["numpy"])
    kind, module = _accelerator()
    for index, device_state in enumerate(state.get(kind, ())[: torch.accelerator.device_count()]):
        module.set_rng_state(device_state, index)


class RandomStreams:
    """States of the generators, compact and without tensors, so that they may differ between captures."""

    def __init__(self) -> None:
        self._owned: dict[str, Any] = {}
        self._barren: dict[int, tuple[Any, int]] = {}
        self.is_complete = True
        """False if the loaders have so many parts that a generator may have been missed."""

    def watch(self, loaders: Iterable[Any]) -> None:
        """Find the generators of data loaders, their samplers, datasets and transforms."""
        search = GeneratorSearch(self._barren)
        search.run(loaders)
        self._owned = search.generators
        self.is_complete = search.is_complete

    def collect(self) -> dict[str, Any]:
        """Return all current states."""
        state = collect_rng()
        state["python"] = _pack_python(state["python"])
        state["torch"] = _pack_torch(state["torch"])
        for kind in state.keys() - HOST_GENERATORS:
            state[kind] = [_pack_torch(item) for item in state[kind]]
        return {**state, **self.collect_owned()}

    def collect_owned(self) -> dict[str, Any]:
        """Return the states of the generators of loaders, without the global ones."""
        owned = []
        for path, generator in self._owned.items():
            owned.append([path, type(generator).__qualname__, _state_of(generator)])
        return {"owned": owned}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all states; generators of loaders by path."""
        plain = {key: value for key, value in state.items() if key != "owned"}
        plain["python"] = _unpack_python(plain["python"])
        plain["torch"] = _unpack_torch(plain["torch"])
        for kind in plain.keys() - HOST_GENERATORS:
            plain[kind] = [_unpack_torch(item) for item in plain[kind]]
        restore_rng(plain)
        self.restore_owned(state)

    def restore_owned(self, state: dict[str, Any]) -> None:
        """Restore the generators of loaders, but not the global ones."""
        # Some appear later: loaders of validation, generators that samplers create at their first iteration.
        for path, kind, generator_state in state["owned"]:
            if kind == type(self._owned.get(path)).__qualname__:
                _load(self._owned[path], generator_state)


def _pack_python(state: Any) -> list[Any]:
    version, words, gauss = state
    return [version, array.array("I", words).tobytes(), gauss]


def _unpack_python(state: Any) -> tuple[Any, ...]:
    words = array.array("I")
    words.frombytes(state[1])
    return state[0], tuple(words), state[2]


def _pack_torch(state: torch.Tensor) -> bytes:
    """Return the bytes of a generator's state, which is flat and on the CPU. Hot: without workers, at each batch."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _unpack_torch(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return _pack_torch(generator.get_state())
    if isinstance(generator, random.Random):
        return _pack_python(generator.getstate())
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _load(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_unpack_torch(state))
    elif isinstance(generator, random.Random):
        generator.setstate(_unpack_python(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
