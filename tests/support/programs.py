"""Python programs that tests run to their end."""

import os
import subprocess
import sys

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
"""What stands before a program that torchrun starts."""
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted workers meet at the addresses of the dead ones
}


def output_of(*arguments: str, code: int = 0, timeout_s: float = 280, **environment: str) -> str:
    """What a program said, which has to end with that code."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, done.stdout[-6000:]
    return done.stdout
