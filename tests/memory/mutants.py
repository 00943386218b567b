"""Copies of the modules of shared memory, as they are or with one rule left out."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

PACKAGE = Path(__file__).parents[2] / "lazysnap" / "memory"
NAMES = ("slot_choice", "words", "slots", "capture_reader")
"""Each imports only modules before it."""


def load(name: str = "", rule: str = "", replacement: str = "") -> SimpleNamespace:
    """Return the modules by name, with ``rule`` in the source of module ``name`` replaced.

    Raises: AssertionError, if the rule is not in the source exactly once.
    """
    copies = {}
    originals = {}
    for module_name in NAMES:
        full_name = f"lazysnap.memory.{module_name}"
        path = PACKAGE / f"{module_name}.py"
        source = path.read_text()
        if module_name == name:
            assert source.count(rule) == 1, f"{path.name} has {rule!r} {source.count(rule)} times, not once"
            source = source.replace(rule, replacement)
        module = ModuleType(full_name)
        originals[full_name] = sys.modules.get(full_name)
        sys.modules[full_name] = module
        exec(compile(source, str(path), "exec"), module.__dict__)
        copies[module_name] = module
    for full_name, original in originals.items():
        if original is None:
            del sys.modules[full_name]
        else:
            sys.modules[full_name] = original
    return SimpleNamespace(**copies)
