"""Writes down all that a program can see of how it was started, as JSON, to the file that is its first argument."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys


def spawned(queue):
    queue.put([__name__, sys.argv, sys.path])


def text_of(path):
    with open(path) as file:
        return file.read()


def status(*names):
    with open("/proc/self/status") as file:
        return [line.split() for line in file if line.split(":")[0] in names]


def stream(number):
    one = (sys.stdin, sys.stdout, sys.stderr)[number]
    if one is None:
        return None
    facts = [one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through, one.isatty()]
    return [*facts, os.readlink(f"/proc/self/fd/{number}").split("[")[0], type(one.buffer).__name__]


def probe():
    main, frame = sys.modules["__main__"], sys._getframe()
    depth = 0
    while frame := frame.f_back:
        depth += 1
    found = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": text_of("/proc/self/cmdline"),
        "comm": text_of("/proc/self/comm"),
        "environ": dict(os.environ),
        "environ_of_children": subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.split("\n"),
        "cwd": os.getcwd(),
        "path": sys.path,
        "executable": [sys.executable, sys.prefix, sys.base_prefix],
        "flags": [str(sys.flags), sys._xoptions, sys.warnoptions],
        "main": [
            main.__file__,
            main.__name__,
            getattr(main.__spec__, "name", None),
            main.__package__,
            type(main.__loader__).__name__,
        ],
        "modules": sorted(sys.modules),
        "depth": depth,
        "handles": sorted(n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
        "streams": [stream(number) for number in range(3)],
        "umask": status("Umask"),
        "signals": status("SigBlk", "SigIgn", "SigCgt"),
        "handlers": {str(one): str(signal.getsignal(one)) for one in signal.valid_signals()},
        "limits": [resource.getrlimit(n) for n in range(16)],
        "nice": [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))],
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "hash": hash("lazysnap"),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
    }
    try:
        found["terminal"] = [os.open("/dev/tty", os.O_RDWR) > 0, os.tcgetpgrp(0) == os.getpgrp()]
    except OSError as error:
        found["terminal"] = error.errno
    if "--spawn" in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        child = context.Process(target=spawned, args=(queue,))
        child.start()
        found["spawned"] = queue.get()
        child.join()
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump(probe(), file)
