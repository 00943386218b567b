"""A restart: survey memory and levels, choose one snapshot, open its shards and read them."""
