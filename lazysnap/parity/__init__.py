"""Parity between nodes: the code of one stripe, and which nodes protect each other. No input, no output, no torch."""
