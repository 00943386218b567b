"""``python -m lazysnap.cli``."""

import sys

from lazysnap.cli import main

sys.exit(main())
