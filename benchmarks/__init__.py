"""Measure lazysnap: ``python -m benchmarks --help``. Figures and methods: docs/benchmarks.md."""

SIZES = {
    # Of the model. Layers, heads, width, context, vocabulary.
    "tiny": (2, 2, 64, 64, 256),
    "small": (4, 8, 256, 128, 1024),
    "30m": (8, 8, 512, 128, 8_192),
    # 98 million parameters: with AdamW's two moments 1.17 GB of state.
    "100m": (12, 12, 768, 128, 16_384),
}
