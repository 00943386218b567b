"""``lazysnap doctor``: check this node, and a level, before a training is started there."""

import argparse
import contextlib
import errno
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from typing import Literal

from rich.filesize import decimal

from lazysnap.cli.inspecting import open_place
from lazysnap.cli.output import Output
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError, LazySnapError, LevelError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.storage import Storage, probe, probe_name
from lazysnap.levels.threads import in_threads
from lazysnap.levels.watchdog import Watchdog
from lazysnap.levels.watched import WatchedStorage
from lazysnap.memory.available import available_bytes
from lazysnap.memory.budget import MemoryBoundExceeded
from lazysnap.memory.slot_files import check_room
from lazysnap.memory.slots import TrainerSlot, make_slot
from lazysnap.shard.checksum import BLOCK_BYTES, block_ranges

_OLDEST = {"torch": (2, 8), "lightning": (2, 5), "accelerate": (1, 15), "transformers": (5, 20)}
"""The oldest supported versions; only installed frameworks are checked."""
_LEAST_BYTES = 1 << 30
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Files that the drivers of CUDA and ROCm make."""
_PEER_S = 5.0
_TRIAL_BYTES = 64 << 20
"""Bytes that are written to a level, to measure its rates."""
_TRIAL_S = 30.0
"""Seconds without progress after which a level counts as hanging."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. ``text`` has the result, and, unless it is good, what to change."""

    topic: str
    verdict: Literal["good", "warn", "bad"]
    """``warn``: training works, but could be faster or safer."""
    text: str


def run(args: argparse.Namespace, output: Output) -> int:
    """Check, and print a line for each check. Blocks: writes ``_TRIAL_BYTES`` to the level, reads and deletes them.

    Returns 1 if something is bad.
    """
    colours = {"good": "green", "warn": "yellow", "bad": "bold red"}
    is_good = True
    checks = []
    for check in _checks(args):
        checks.append(asdict(check))
        output.line(f"{check.verdict:7}{check.topic:12} {check.text}", colours[check.verdict])
        if check.verdict == "bad":
            is_good = False
    return output.result(ok=is_good, checks=checks)


def _checks(args: argparse.Namespace) -> Iterator[CheckResult]:
    yield from _versions()
    yield _memory()
    yield _huge_pages()
    yield _keeper()
    yield from _device()
    yield from map(_peer, args.peer)
    if args.url is None:
        yield CheckResult("level", "warn", "not checked: name a path or URL to check it (lazysnap doctor URL)")
    else:
        yield from _level(args)


# ---------------------------------------------------------------- this node


def _versions() -> Iterator[CheckResult]:
    installed = [f"Python {platform.python_version()}"]
    old = []
    for package, oldest in _OLDEST.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        installed.append(f"{package} {version}")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
            old.append(f"{package} {version} is older than {'.'.join(map(str, oldest))}")
    if platform.system() != "Linux":
        yield CheckResult("system", "bad", f"{platform.system()}: lazysnap needs Linux")
    if old:
        yield CheckResult("versions", "bad", f"{'; '.join(old)}: upgrade")
    else:
        yield CheckResult("versions", "good", ", ".join(installed))


def _memory() -> CheckResult:
    free = available_bytes()
    text = (
        f"{decimal(free)} free: enough for a training state of {decimal(free // 3)}, which takes three times its size"
    )
    if free < _LEAST_BYTES:
        return CheckResult("memory", "bad", f"{text}; raise the memory limit of the container or control group")
    return CheckResult("memory", "good", text)


def _huge_pages() -> CheckResult:
    with contextlib.suppress(OSError), open(_HUGE_PAGES) as file:
        chosen = re.findall(r"\[(\w+)\]", file.read())
        if chosen and chosen[0] not in ("never", "deny"):
            return CheckResult("huge pages", "good", f"shared memory may use them ({chosen[0]})")
        return CheckResult(
            "huge pages", "warn", f"off; memory is ready in a third of the time after `echo advise > {_HUGE_PAGES}`"
        )
    return CheckResult("huge pages", "warn", "this kernel has none for shared memory, so a start takes longer")


def _keeper() -> CheckResult:
    """Bind the socket that a keeper of this user would have, and make a slot."""
    try:
        lock = JobIdentity(f"doctor-{os.urandom(8).hex()}", os.getuid(), socket.gethostname()).files.try_lock()
        assert lock is not None, "the name is new"
        with contextlib.closing(lock):
            lock.bind().close()
            lock.remove()
        make_slot(4096, 1 << 20).close()
    except (LazySnapError, OSError) as error:
        return CheckResult("keeper", "bad", f"none can run here: {error}")
    return CheckResult("keeper", "good", "a Unix socket, a lock and sealed shared memory can be made")


def _device() -> Iterator[CheckResult]:
    if not any(map(os.path.exists, _DEVICES)):
        yield CheckResult("device", "good", "no GPU here: captures come from the memory of the CPU")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        change = "LimitMEMLOCK=infinity, or memlock in limits.conf"
        if hard == resource.RLIM_INFINITY:
            change = "`ulimit -l unlimited`"
        yield CheckResult("memlock", "warn", f"{decimal(soft)}: larger slots are copied through a buffer; set {change}")
    # Imported here, because torch takes seconds to import and is only needed here.
    import torch

    from lazysnap.capture.registration import register

    if not torch.accelerator.is_available():
        yield CheckResult(
            "device", "bad", f"torch {torch.__version__} sees no device: install the build for this driver"
        )
        return
    device = torch.accelerator.current_accelerator()
    assert device is not None
    made = make_slot(4096, 64 << 20)
    slot = TrainerSlot.attach(os.dup(made.descriptor))
    is_registered = register(slot, torch.device(device.type, 0))
    slot.close()
    made.close()
    if is_registered:
        yield CheckResult("device", "good", f"{device.type}: 64 MiB of a slot were page-locked")
    else:
        yield CheckResult(
            "device", "warn", f"{device.type} locked no slot in memory: the next step waits for copies; see memlock"
        )


def _peer(host: str) -> CheckResult:
    """Connect to an unused port of ``host``: a reachable node refuses the connection."""
    topic = f"peer {host}"
    try:
        address = socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], address[1]) as sock:
            sock.settimeout(_PEER_S)
            code = sock.connect_ex(address[4])
    except OSError as error:
        return CheckResult(topic, "bad", f"{error}; name it by an address that this node can resolve")
    if code in (0, errno.ECONNREFUSED):
        return CheckResult(topic, "good", f"answers at {address[4][0]}")
    reason = os.strerror(code)
    if code in (errno.EAGAIN, errno.ETIMEDOUT):
        reason = "no answer"
    return CheckResult(topic, "bad", f"{address[4][0]}: {reason}; allow TCP on any port among the nodes of a job")


# ---------------------------------------------------------------- a level


def _level(args: argparse.Namespace) -> Iterator[CheckResult]:
    made: list[str] = []
    try:
        SnapshotConfig(levels=(PersistentLevel(args.url),))  # refuses places that would not outlive a process
        storage = open_place(args.url, args.storage_option)
        is_local = isinstance(storage, LocalStorage)
        if is_local:
            made = _missing(storage.url)
        yield from _trial(storage)
        if is_local:
            yield from _local(storage.url)
    except (ConfigError, LevelError, OSError) as error:
        yield CheckResult("level", "bad", f"{error}")
    finally:
        for directory in made:
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _missing(path: str) -> list[str]:
    """Return ``path`` and the directories around it that do not exist, the innermost first."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _trial(storage: Storage) -> Iterator[CheckResult]:
    """Write, read back and delete objects. Raises: LevelError, also if nothing moves for ``_TRIAL_S``."""
    small = f"a small object at {storage.url}"
    Watchdog(lambda beat: probe(WatchedStorage(storage, beat)), small, _TRIAL_S).result()
    yield CheckResult("level", "good", f"{storage.url}: a small object was written, read and deleted")
    size = decimal(_TRIAL_BYTES)
    large = f"{size} at {storage.url}"
    trial = Watchdog(lambda beat: _seconds(WatchedStorage(storage, beat), _TRIAL_BYTES), large, _TRIAL_S)
    write_s, read_s = trial.result()
    write = f"{decimal(int(_TRIAL_BYTES / write_s))}/s"
    read = f"{decimal(int(_TRIAL_BYTES / read_s))}/s"
    yield CheckResult("rates", "good", f"durable writes of {write}, reads of {read} ({size})")


def _seconds(storage: Storage, size_bytes: int) -> tuple[float, float]:
    """Return the seconds of a durable write and of a read."""
    data = map_anonymous(BLOCK_BYTES)
    data[:] = os.urandom(1 << 20) * (BLOCK_BYTES >> 20)
    path = probe_name()
    blocks = list(block_ranges(size_bytes))
    began = time.monotonic()
    with contextlib.closing(storage.create(path, size_bytes)) as writer:
        writes = [partial(writer.write, offset, data[:length]) for offset, length in blocks]
        in_threads(writes, storage.parallel_writes, "lazysnap-write")
        writer.publish()
    wrote = time.monotonic()
    try:
        with contextlib.closing(storage.reader(path)) as reader:
            # Made one by one: not all blocks are in memory together.
            reads = (partial(reader.read_into, offset, map_anonymous(length)) for offset, length in blocks)
            in_threads(reads, storage.parallel_reads, "lazysnap-read")
        return wrote - began, time.monotonic() - wrote
    finally:
        storage.delete(path)


def _local(directory: str) -> Iterator[CheckResult]:
    facts = os.statvfs(directory)
    yield CheckResult(
        "space", "good", f"{decimal(facts.f_bavail * facts.f_frsize)} free: keep_last + 1 snapshots must fit"
    )
    try:
        check_room(directory, BLOCK_BYTES)
    except MemoryBoundExceeded as error:
        yield CheckResult("spill", "warn", str(error))
    else:
        yield CheckResult("spill", "good", "if memory is short, copies can be files here")
