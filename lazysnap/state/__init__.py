"""Training state: the interface to a training loop, and the encoding as named tensors and small state."""
