"""The shard format: one safetensors file and one JSON manifest per node (docs/format.md)."""
