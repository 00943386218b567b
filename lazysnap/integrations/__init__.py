"""Integrations with training frameworks; each imports its framework only when it is used."""

import random

_random_state = random.getstate()
import rich.console  # noqa: E402, F401

# rich draws a random number at its import; the program may have seeded the generator before.
random.setstate(_random_state)
