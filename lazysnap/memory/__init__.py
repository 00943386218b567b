"""Slots: shared memory for one shard each, which outlives the process that wrote it."""
