"""The ranks of a training: the part of the state that each captures, and their agreements, never one per snapshot."""
