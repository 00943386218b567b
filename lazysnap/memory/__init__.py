"""Slots: shared memory that holds one shard each, and outlives the process that wrote it."""
