"""Which steps the levels store, and which snapshots are complete: the coordinator's side, a node's, and what they tell
each other. Pure.
"""
