"""Pure decisions on which steps the levels store, and which snapshots are complete: coordinator, node, messages."""
