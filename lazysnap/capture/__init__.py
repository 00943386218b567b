"""Copies from the training state into a slot, while training continues (DataStates-LLM, section 4.2)."""
