"""A long cable: what goes in at one network device comes out at the other one later, or never. Needs root.

usage: slow_link.py DEVICE DEVICE DELAY_S LOSS     (makes both, says so in a line, and runs until its input ends)
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

FRAME_BYTES = 1 << 16
MAX_FRAMES = 1000
"""On their way at one time; what comes beyond is lost, as where a buffer is full."""
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x1002


def open_tap(name: str) -> int:
    """A new network device; it ends with the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    return fd


def relay(near: int, far: int, delay_s: float, loss: float) -> None:
    """Until the standard input ends. One queue for both directions: what went in first comes out first."""
    chance = random.Random(near)
    waiting: deque[tuple[float, int, bytes]] = deque()
    readable: list[int] = []
    while 0 not in readable:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([0, near, far], [], [], pause_s)
        for fd in {near, far}.intersection(readable):
            frame = os.read(fd, FRAME_BYTES)
            if len(waiting) < MAX_FRAMES and chance.random() >= loss:
                waiting.append((time.monotonic() + delay_s, far if fd == near else near, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, out, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the device is down
                os.write(out, frame)


if __name__ == "__main__":
    near, far = (open_tap(name) for name in sys.argv[1:3])
    print("up", flush=True)
    relay(near, far, float(sys.argv[3]), float(sys.argv[4]))
