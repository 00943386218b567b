"""A double of the CUDA runtime that keeps its books like the real one."""

from pathlib import Path


def is_mapped(pointer):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= pointer < int(end, 16) for start, end in ranges)


class CudaRuntime:
    """What ``torch.cuda.cudart()`` offers, with the answers of the real one."""

    def __init__(self):
        self.registered = {}
        self.was_mapped_at_unregister = []
        self.registrations = 0

    def cudaHostRegister(self, pointer, size, flags):
        if pointer in self.registered:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[pointer] = size
        self.registrations += 1
        return 0

    def cudaHostUnregister(self, pointer):
        self.was_mapped_at_unregister.append(is_mapped(pointer))
        return 0 if self.registered.pop(pointer, None) else 713  # cudaErrorHostMemoryNotRegistered
