"""One worker process: ``worker.py MODULE.FUNCTION JOB_AS_JSON`` calls a function and prints its lines as JSON.

This checkout's benchmark, but the package of the checkout that ``LAZYSNAP_TREE`` names.
"""

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    importlib.import_module("benchmarks")
    sys.path[0] = os.environ["LAZYSNAP_TREE"]
    # What the package tells its user is not measured, and would be taken for the reason of a failure.
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    module, function = sys.argv[1].split(".")
    for line in getattr(importlib.import_module(f"benchmarks.{module}"), function)(json.loads(sys.argv[2])) or ():
        print(json.dumps(line), flush=True)
