"""The default of ``verify_restart`` in tests: a restart resumes the newest step, as most are about other things."""

import os

PROVES = {"LAZYSNAP_TEST_PROVES": "1"}
"""Environment of a program whose restarts are to be as those of users."""


def resume_newest() -> None:
    """From here on settings that do not say otherwise have ``verify_restart=False``."""
    from lazysnap import SnapshotConfig

    if not PROVES.items() <= os.environ.items():
        SnapshotConfig.__init__.__kwdefaults__["verify_restart"] = False
