"""Stored snapshots: the catalogue of a level, and the reader of one snapshot."""
