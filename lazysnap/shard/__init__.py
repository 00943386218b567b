"""The shard format, version 1: one safetensors file and one JSON manifest per rank (docs/format.md)."""
