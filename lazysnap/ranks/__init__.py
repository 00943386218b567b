"""The ranks of a training: what each of them captures, and the agreements between them, never one per snapshot."""
