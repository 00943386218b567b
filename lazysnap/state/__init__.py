"""Training state: where it comes from, and how it becomes named tensors plus safe small state."""
