"""A small GPT and a real text, used by the examples and by the benchmark. Knows nothing of snapshots."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

HAMLET = Path(__file__).parent / "data" / "hamlet.txt"


@dataclass(frozen=True)
class GPTSize:
    """Dimensions of the network."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a two-layer network, each after a layer norm and with a residual connection."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.norm_attention = nn.LayerNorm(size.width)
        self.attention_in = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same."""
        batch, time, width = x.shape
        heads = self.attention_in(self.norm_attention(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """A decoder-only transformer with tied input and output embeddings."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, time) token ids -> (batch, time, vocabulary) logits."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next character."""
        return functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


class TextWindows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """All windows of ``context`` characters, and the same windows one character on."""

    def __init__(self, text: str, context: int) -> None:
        self.characters = sorted(set(text))
        index = {character: i for i, character in enumerate(self.characters)}
        self.ids = torch.tensor([index[character] for character in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.context

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        start = item * self.context
        return self.ids[start : start + self.context], self.ids[start + 1 : start + self.context + 1]
