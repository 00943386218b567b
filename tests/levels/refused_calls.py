"""Makes the kernel refuse a system call to this process, as a file system would that lacks it or fails.

A seccomp filter: what is tested runs unchanged, and gets the error from the kernel.
"""

import ctypes
import errno
import platform
import struct

import pytest

_NUMBERS = {
    "x86_64": {"link": 86, "linkat": 265, "renameat2": 316, "fallocate": 285, "fdatasync": 75, "pwrite64": 18},
    "aarch64": {"link": 37, "linkat": 37, "renameat2": 276, "fallocate": 47, "fdatasync": 83, "pwrite64": 68},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def is_possible() -> bool:
    return platform.machine() in _NUMBERS


needs_seccomp = pytest.mark.skipif(not is_possible(), reason="system call numbers of this processor are not listed")


def refuse(call: str, error: str) -> None:
    """From now on ``call`` fails with ``error`` in this thread and in those it starts."""
    number = _NUMBERS[platform.machine()][call]
    code = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),
            (_IF_EQUAL, 0, 1, number),
            (_RETURN, 0, 0, _ERROR | getattr(errno, error)),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "no seccomp filters here")
