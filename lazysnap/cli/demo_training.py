"""The training that ``lazysnap demo`` kills: a small transformer in a plain PyTorch loop, on source text of Python.

It only needs torch.
"""

import argparse
import hashlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from lazysnap import PersistentLevel, ResumableLoader, SnapshotConfig, SnapshotEngine
from lazysnap.cli.chaos import bytes_of

_CONTEXT = 64
_WIDTH = 64
_BATCH = 4
_STEPS = 200


class _Model(nn.Module):
    """A causal transformer that predicts the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, _WIDTH)
        self.positions = nn.Parameter(torch.randn(_CONTEXT, _WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_CONTEXT), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, time) character numbers -> (batch, time, characters) logits."""
        hidden = self.layers(self.tokens(ids) + self.positions, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def _windows() -> tuple[list[Tensor], int]:
    """Return pieces of ``_CONTEXT + 1`` characters of Python's own source text, and the number of characters."""
    text = inspect.getsource(argparse)
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(character) for character in text])
    starts = range(0, len(ids) - _CONTEXT, _CONTEXT + 1)
    return [ids[start : start + _CONTEXT + 1] for start in starts], len(alphabet)


def _digest(*states: Any) -> str:
    """Return the SHA-256 of every bit of the tensors in ``states``."""
    total = hashlib.sha256()
    for leaf in _pytree.tree_leaves(states):
        if isinstance(leaf, Tensor):
            total.update(bytes_of(leaf))
    return total.hexdigest()


def main() -> None:
    """Train, print a line per step, and at the end the digest of weights and optimizer state."""
    torch.set_num_threads(1)  # the steps are too small for several threads
    torch.manual_seed(1603)
    windows, characters = _windows()
    model = _Model(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    loader = ResumableLoader(torch.utils.data.DataLoader(windows, _BATCH, shuffle=True, drop_last=True))  # type: ignore[arg-type]
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    # It is shorter than the minute after which a level stores by itself.
    config = SnapshotConfig(levels=(PersistentLevel("lazysnap", every_n_steps=20),))
    with SnapshotEngine(config, state) as engine:
        engine.restore("latest")
        while engine.step < _STEPS:
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                engine.boundary()
                print(f"step {engine.step} loss {loss.item():.8f}", flush=True)  # noqa: T201
                if engine.step == _STEPS:
                    break
    print(f"weights and optimizer state: {_digest(model.state_dict(), optimizer.state_dict())}")  # noqa: T201


if __name__ == "__main__":
    main()
