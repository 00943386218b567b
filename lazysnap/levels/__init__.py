"""Persistent levels: storage backends, and the snapshots kept on them."""
