"""An asynchronous device in software: what order of copies and kernels a program relies on shows without a GPU.

``load()`` compiles ``backend/`` (once; the result is cached by source and PyTorch version), registers the device type
``software`` with PyTorch and returns this module, which PyTorch then uses as ``torch.software``. The device belongs to
the whole process, so its tests run in a process of their own (``test_on_software_device.py``).

Streams are queues. A scheduler runs their tasks late, in an order that the seed draws, one at a time. It takes turns
when the host calls the device, and as many as are needed when the host waits: no thread and no pause of its own. Copies
honour ``non_blocking`` only where the host memory is page-locked. Shapes of results come from meta kernels, values from
CPU kernels. Two nets catch a missing wait:

* the checker: ``races()`` lists every access that no event orders behind an earlier one, in program order and so
  whatever the timing was. The host's own accesses to page-locked memory are told by ``host_reads``;
* bytes: work is late by chance (``configure(seed=)``), copies land in pieces, freed memory is poisoned.

The same seed and the same calls of the host give the same order of all work (``counters()["order"]``). A thread that
waits for the device beside training lets it work only while every other thread of the process sleeps; when exactly it
goes on itself is up to the operating system.

Not there: convolutions, process groups, real graphs (``capturing_graph`` only says that one is
being captured).
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import torch

NAME = "software"
SOURCES = sorted(pathlib.Path(__file__).with_name("backend").iterdir())
BUILD_DEADLINE_S = 900


class CannotBuild(Exception):
    """There is no compiler, or it refuses the sources."""


# ---------------------------------------------------------------- building


def built() -> pathlib.Path:
    """The compiled extension. Blocks: about a minute the first time. Raises: CannotBuild."""
    flags = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-interference-size", "-DTORCH_EXTENSION_NAME=_software"]
    key = hashlib.sha256(repr((torch.__version__, sys.version, flags)).encode())
    for source in SOURCES:
        key.update(source.read_bytes())
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"), "lazysnap-tests")
    target = cache / f"_software-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuild("the software device needs g++, which is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run build it once
        if not target.exists():
            _compile(compiler, flags, target)
    return target


def _compile(compiler: str, flags: list[str], target: pathlib.Path) -> None:
    torch_root = pathlib.Path(torch.__file__).parent
    includes = [torch_root / "include", torch_root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*flags, *(f"-I{path}" for path in includes)]
    libraries = torch_root / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        objects = {source: f"{directory}/{source.stem}.o" for source in SOURCES if source.suffix == ".cpp"}
        made = f"{directory}/made.so"
        running = [
            subprocess.Popen([compiler, *flags, "-c", str(source), "-o", to], stderr=subprocess.PIPE, text=True)
            for source, to in objects.items()
        ]
        for process in running:
            _check(process)
        link = [compiler, "-shared", "-o", made, *objects.values(), f"-L{libraries}", "-ltorch_python", "-ltorch_cpu"]
        link += ["-ltorch", "-lc10", "-pthread", f"-Wl,-rpath,{libraries}"]
        _check(subprocess.Popen(link, stderr=subprocess.PIPE, text=True))
        os.replace(made, target)


def _check(process: "subprocess.Popen[str]") -> None:
    try:
        _, errors = process.communicate(timeout=BUILD_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise CannotBuild(f"g++ did not end within {BUILD_DEADLINE_S} s") from None
    if process.returncode:
        raise CannotBuild(f"g++ refuses the software device: {errors[-2000:]}")


def load(devices: int = 2):
    """Register the device with PyTorch, once for this process. Returns this module. Raises: CannotBuild."""
    global _backend
    if _backend is None:
        loader = importlib.machinery.ExtensionFileLoader("_software", str(built()))
        spec = importlib.util.spec_from_file_location("_software", loader.path, loader=loader)
        _backend = importlib.util.module_from_spec(spec)
        loader.exec_module(_backend)
        _backend.set_device_count(devices)
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, sys.modules[__name__])
        torch.utils.generate_methods_for_privateuse1_backend()
        # Only now does torch count the device as initialised: before, is_pinned() is False for all memory.
        torch.empty(1, pin_memory=True)
        atexit.register(_drain)  # tasks run kernels of PyTorch, which is taken down
    return sys.modules[__name__]


def _drain() -> None:
    if not _backend.forked():
        for device in range(device_count()):
            _backend.synchronize_device(device)


_backend = None

# ---------------------------------------------------------------- what tests ask for


def configure(
    *, seed: int = 0, failing_allocation: int = 0, has_streams: bool = True, dies_at: int = 0, report_to: int = -1
) -> None:
    """Draw the order of work anew from ``seed``; let the n-th allocation from now on fail (0: none); take streams away.

    ``dies_at``: SIGKILL ends the process at the n-th turn of the scheduler from now on. ``report_to``: an open file
    that gets each line of ``races`` at once, and at such a death a line of JSON with the turns and the order so far.
    """
    _backend.configure(seed, failing_allocation, has_streams, dies_at, report_to)


@contextlib.contextmanager
def without_page_locking():
    """Be a device whose module has no ``cudart``, and so no call that page-locks memory."""
    there = globals().pop("cudart")
    try:
        yield
    finally:
        globals()["cudart"] = there


def races() -> list[str]:
    """Accesses that no event orders, since the last call."""
    return _backend.races()


def counters() -> dict[str, int]:
    """Kernels, copies and registrations so far, by kind."""
    return _backend.counters()


def synchronisations() -> int:
    """How often the calling thread has waited for the device."""
    return _backend.synchronisations()


def host_reads(tensor: torch.Tensor, what: str) -> None:
    """Tell the checker that this thread reads page-locked memory now."""
    _backend.host_access(tensor.data_ptr(), tensor.nbytes, False, what)


def host_join() -> None:
    """Tell the checker that this thread waited for what all other threads of the host did."""
    _backend.host_join()


def all_reduce(tensor: torch.Tensor, shared: torch.Tensor, rank: int, world: int) -> None:
    """Queue the mean of ``tensor`` over ranks: no host waits. ``shared``: zeros in the shared memory of all ranks,
    for each 64 bytes and two times the bytes of the largest tensor.
    """
    _backend.all_reduce(tensor, shared, rank, world, (shared.nbytes // world - 64) // 2)


@contextlib.contextmanager
def holding_stream():
    """Let the current stream do nothing of what is queued meanwhile."""
    stream = torch.accelerator.current_stream()
    let_go = _backend.hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        let_go()


@contextlib.contextmanager
def capturing_graph():
    """Let the program believe that what it does is captured into a graph."""
    global _is_capturing
    _is_capturing = True
    try:
        yield
    finally:
        _is_capturing = False


_is_capturing = False

# ---------------------------------------------------------------- what PyTorch, and programs, ask of torch.software

Stream = torch.Stream


class Event:
    """As ``torch.cuda.Event``: it knows ``blocking``, unlike ``torch.Event``, which it does not mix with."""

    blocking_waits = 0

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._event = torch.Event(NAME, enable_timing=enable_timing)
        self._is_blocking = blocking

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        return self._event.query()

    def elapsed_time(self, other: "Event") -> float:
        return self._event.elapsed_time(other._event)

    def synchronize(self) -> None:
        Event.blocking_waits += self._is_blocking
        self._event.synchronize()


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return _backend.device_count()


def current_device() -> int:
    return _backend.current_device()


def set_device(device: int) -> None:
    _backend.set_device(_index(device))


def synchronize(device=None) -> None:
    torch.accelerator.synchronize(device)


def current_stream(device=None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def is_current_stream_capturing() -> bool:
    return _is_capturing


def manual_seed_all(seed: int) -> None:
    for device in range(device_count()):
        _backend.default_generator(device).manual_seed(seed)


def manual_seed(seed: int) -> None:
    _backend.default_generator(current_device()).manual_seed(seed)


def get_rng_state(device=None) -> torch.Tensor:
    return _backend.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device=None) -> None:
    _backend.default_generator(_index(device)).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return _backend.forked()


def _index(device) -> int:
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def cudart():
    """Page-locking goes by CUDA's names, as on every device whose module has ``cudart``."""
    return sys.modules[__name__]


def cudaHostRegister(pointer: int, nbytes: int, flags: int) -> int:
    return _backend.host_register(pointer, nbytes)


def cudaHostUnregister(pointer: int) -> int:
    # Any thread may wait for a copy before memory goes; that threads hand it over rightly is taken for granted.
    host_join()
    return _backend.host_unregister(pointer)
