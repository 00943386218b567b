"""The keeper: one process per job and node that owns the memory and does all work after the capture.

The "snapshot management process" of REFT (section 3): it outlives the trainer, and it starts without torch.
"""
