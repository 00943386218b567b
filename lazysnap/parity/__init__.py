"""Parity between nodes: the code of one stripe, and which nodes protect each other. No I/O, no torch."""
