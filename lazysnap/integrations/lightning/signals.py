"""SIGTERM in a fit: lazysnap ends it, in place of Lightning."""

import signal
import sys
import threading
from typing import Any

from lazysnap.engine import SnapshotEngine
from lazysnap.engine.signals import ChainedHandler


def listen(trainer: Any, engine: SnapshotEngine) -> None:
    """Listen for a notice of the end, which ends the fit as Lightning would, but for the exit code.

    Lightning's own handler of SIGTERM does a collective, which hangs if not all ranks get the signal, waits for the end
    of the batch, and leaves with exit code 0. Handlers of the program are called as before. Idempotent.
    """
    if engine.session.listens:
        return
    connector = trainer._signal_connector
    before = getattr(connector, "_original_handlers", {}).get(signal.SIGTERM, signal.SIG_DFL)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and type(signal.getsignal(signal.SIGTERM)).__name__ == "_HandlersCompose":
        # Lightning puts back what was there before the fit at its end.
        signal.signal(signal.SIGTERM, ChainedHandler(before) if callable(before) else before)
    loop = sys.modules[type(trainer.fit_loop.epoch_loop).__module__]
    engine.session.listen(getattr(loop, "SIGTERMException", SystemExit))
    if trainer.received_sigterm:  # just before
        connector.received_sigterm = False
        signal.raise_signal(signal.SIGTERM)
