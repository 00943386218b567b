"""The keeper: one process per job and node that owns the memory and does all work after a capture.

It is the "snapshot management process" of REFT (section 3): it outlives the trainer, and starts without torch.
"""
