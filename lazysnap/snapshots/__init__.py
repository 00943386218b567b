"""Snapshots as they are stored: the catalogue of a level, and the reader of one snapshot."""
