"""An init as docker's: starts its arguments, hands SIGTERM on, ends with the code of what it started."""

import os
import signal
import sys

if child := os.fork():
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)
os.execvp(sys.argv[1], sys.argv[1:])
