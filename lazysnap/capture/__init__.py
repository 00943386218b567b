"""Copies from the training state into a slot, while training goes on (DataStates-LLM, section 4.2)."""
