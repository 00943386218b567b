"""Every wait, event, comparison and end word of the capture, each spoilt once: ``mutations.py PLACE``.

A mutant is one change of the package's source, in a process of its own that runs the named tests on the software
device.
"""

import os
from dataclasses import dataclass
from functools import partial

# Imported here, not by each process: what the tests need but the package.
import lightning.pytorch  # noqa: F401
import pytest_timeout  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401
from support import mutants

SUITES = {
    "gpu": "tests/gpu/test_device_capture.py",
    "frozen": "tests/gpu/test_frozen_tensors.py",
    "software": "tests/device/suite_on_software.py",
    "ring": "tests/device/suite_without_page_locking.py",
    "copy": "tests/capture/test_copy.py",
}


@dataclass(frozen=True)
class Mutant:
    """``lines`` of ``file`` become ``instead``; nothing by default. ``test``: the one that notices, as SUITE:NAME."""

    file: str
    lines: str
    test: str
    instead: str = "pass"

    def text(self) -> str:
        """The spoilt source. Raises: AssertionError, if the lines are not there any more."""
        source = (mutants.PACKAGE / self.file).read_text()
        found = [place for place in range(len(source)) if source.startswith(self.lines, place)]
        assert len(found) == 1, f"{self.file} has {self.lines!r} {len(found)} times, not once: change mutations.py"
        return source.replace(self.lines, self.instead)


WHOLE, SCHEDULES, CHANGED = (
    "gpu:test_the_capture_is_of",
    "gpu:test_in_any_schedule",
    "gpu:test_a_tensor_that_changes_bef",
)
HUNG, SHORT, THREADS = "gpu:test_a_device_that_does", "software:test_a_device_without_memory", "software:test_threads"
DEVICE, COPIER, CAPTURE = "capture/device.py", "capture/copier.py", "capture/capture.py"
CAPTURES, FROZEN = "capture/captures.py", "capture/frozen.py"
NO_TRACE = "frozen:test_a_change_without_a_trace"
MUTANTS = [
    # What orders the work of a device.
    Mutant(DEVICE, "self._side.wait_event(compute.record_event())", WHOLE),
    Mutant(DEVICE, "compute.wait_event(self._done)", WHOLE),
    Mutant(DEVICE, "self._done = self._side.record_event()", WHOLE),
    Mutant(DEVICE, "capture.device_copies.append((before, event_for_thread(self._device, enable_timing=True)))", WHOLE),
    Mutant(DEVICE, "except BaseException:\n                self._end(capture, before)", SHORT, "except BaseException:"),
    Mutant(CAPTURES, "self._gate_devices(capture)\n        return", WHOLE, "return"),
    Mutant(CAPTURES, "self._gate_devices(capture)\n            raise", SHORT, "raise"),
    Mutant(CAPTURES, "if device in self._copiers:", "software:test_a_second_device", "if True:"),
    Mutant("capture/devices.py", "    event.record()\n", SCHEDULES, ""),
    # What may change at any time is read on the compute stream.
    Mutant(DEVICE, "if capture.plan.records[index].lazy is lazy:", "gpu:test_buffers_that_change", "if lazy:"),
    Mutant(DEVICE, "self._send(capture, eager)", "gpu:test_a_large", "with self._side: self._send(capture, eager)"),
    # Frozen tensors that the slot has already.
    Mutant(
        DEVICE,
        "unchanged = self._frozen.unchanged(capture)",
        "frozen:test_what_changes_behind",
        "with self._side: unchanged = self._frozen.unchanged(capture)",
    ),
    Mutant(DEVICE, "self._frozen.check(capture, unchanged)", NO_TRACE),
    Mutant(FROZEN, " or before.sequence != capture.previous_sequence", "frozen:test_a_capture_that_was_dropped", ""),
    Mutant(FROZEN, "mark == mark_before and ", "frozen:test_a_change_that_leaves", ""),
    Mutant(FROZEN, "landed.synchronize()", "frozen:test_the_result_of_the_comparison"),
    Mutant(FROZEN, "self._changing.update(changed)", NO_TRACE),
    # What the copy thread waits for.
    Mutant(DEVICE, "(start, landed.synchronize)", SCHEDULES, "(start, lambda: None)"),
    Mutant(COPIER, "behind.synchronize()\n            capture.copy_s", SCHEDULES, "capture.copy_s"),
    Mutant(COPIER, "if batch.start < first_of_device:", "gpu:test_the_watermark_covers", "if True:"),
    Mutant(COPIER, "_await_devices(capture)\n                capture.rel", SHORT, "capture.rel"),
    Mutant(COPIER, "behind.synchronize()\n        except", SHORT, "pass\n        except"),
    Mutant(COPIER, "torch.accelerator.set_device_index(capture.plan.devices[0])", THREADS),
    Mutant("capture/devices.py", "blocking=True)\n", THREADS, "blocking=False)\n"),
    # Slots that are not page-locked.
    Mutant(DEVICE, "partial(self._end, capture, before)", "ring:test_the_capture_is_of", "lambda: None"),
    Mutant(COPIER, "if capture.device_copies:", "ring:test_the_boundary_does_not", "if True:"),
    Mutant(DEVICE, "side.wait_event(ready)", "ring:test_the_capture_is_of"),
    Mutant(DEVICE, "landed.synchronize()", "ring:test_in_any_schedule"),
    Mutant(DEVICE, "buffers[(number + 1) % 2]", "ring:test_in_any_schedule", "buffers[0]"),
    Mutant(DEVICE, "part.record_stream(side)", "software:test_a_reader_that_stops"),
    # What the training thread waits for.
    Mutant(
        CAPTURES,
        "if not self.wait_read(timeout_s):",
        "gpu:test_the_gate_of_a_state_on_both",
        "if False:",
    ),
    Mutant(CAPTURES, "self.wait_released(timeout_s)\n            ", "gpu:test_a_gate_behind_the_next", ""),
    Mutant(CAPTURES, "if not capture.released.wait(max(0.0, deadline - time.monotonic())):", HUNG, "if False:"),
    Mutant(CAPTURES, 'capture.drop(CapturePhase.FAILED, f"the copy did not end within {timeout_s:g} s")', HUNG),
    # The comparisons.
    Mutant(CAPTURES, "capture.pass_gate()", CHANGED),
    Mutant(CAPTURE, "self._compare()\n            self.is_past", CHANGED, "pass\n            self.is_past"),
    Mutant(CAPTURE, "()\n            self.is_past_gate = True", "gpu:test_a_change_behind_the_gate", "()"),
    Mutant(
        CAPTURE,
        "COPYING and not self.is_past_gate:",
        "copy:test_a_tensor_that_changes",
        "COPYING and False:",
    ),
    Mutant(CAPTURE, "versions = versions_of(sources)", CHANGED, "versions = self._versions"),
    Mutant(
        CAPTURE,
        "pointers = list(map(torch.Tensor.data_ptr, sources))",
        "copy:test_a_tensor_whose_memory",
        "pointers = self.plan.lazy_pointers",
    ),
    # The end word, and that a capture which was given up has none.
    Mutant(COPIER, "capture.commit()", WHOLE),
    Mutant(CAPTURE, "self.slot.commit(copied_ns=int(1e9 * self.copy_s))", WHOLE),
    Mutant(
        CAPTURE,
        "if self.phase is not CapturePhase.COPYING:\n                return False\n            faults",
        "copy:test_a_copy_that_hangs",
        "faults",
    ),
    Mutant(CAPTURE, "self.slot.discard(self.sequence)", HUNG),
    Mutant(
        CAPTURE,
        "if self.phase is not CapturePhase.COPYING:\n            return False\n        self.sl",
        "gpu:test_gi",
        "self.sl",
    ),
    Mutant(
        CAPTURES, 'capture.drop(CapturePhase.ABORTED, f"it could not begin: {type(error).__name__}: {error}")', SHORT
    ),
]


def spoil(mutant: Mutant) -> None:
    """Change the package, in this process."""
    mutants.replace_module(mutant.file, compile(mutant.text(), mutants.PACKAGE / mutant.file, "exec"))


def change_of(mutant: Mutant) -> mutants.Change:
    suite, name = mutant.test.split(":")
    alone = ("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(mutants.ROOT), "--noconftest", "-W", "ignore")
    options = ("-x", "-q", *alone, "-p", "pytest_timeout", "--timeout", "60", "-p", "device.checked")
    arguments = (*options, str(mutants.ROOT / SUITES[suite]), "-k", name)
    return mutants.Change(f"{mutant.file}: {mutant.lines}", partial(spoil, mutant), arguments)


if __name__ == "__main__":
    mutants.main([change_of(mutant) for mutant in MUTANTS])
