"""The shard format: one safetensors file and one JSON manifest per rank, or per node (docs/format.md)."""
