"""A restart: what memory and levels hold is surveyed, one snapshot is chosen, its shards are opened and read."""
