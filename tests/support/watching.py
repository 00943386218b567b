"""A loop's own judge of the loss, as in examples/rollback_on_nan.py."""

import torch
import torch.distributed as dist


class Watch:
    """Goes back where the loss is not finite on any rank."""

    def __init__(self, engine):
        self.engine = engine
        self.last = None

    def see(self, loss):
        """True if training went back."""
        is_bad = torch.tensor(int(not torch.isfinite(loss)))
        if dist.is_initialized():
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if is_bad:
            self.last = self.engine.rollback(reason="the loss is not finite")
        return bool(is_bad)
