"""The names of an optimizer's parameters: its own state knows them by their number alone."""

from lazysnap.capture.plan import storage_of
from lazysnap.engine.events import EventLog
from lazysnap.state.source import StateSource
from lazysnap.state.walk import Walk


def names_of_parameters(source: StateSource, everything: Walk, log: EventLog) -> dict[str, list[str]] | None:
    """By path of an optimizer, in its order; those of which one has no name are left out.

    Warns of parameters whose values are in no part of the state.
    """
    names, optimizers = source.parameter_names(), source.optimizer_parameters()
    found = {path: [names.get(id(one), "") for one in parameters] for path, parameters in optimizers.items()}
    known = {path: listed for path, listed in found.items() if all(listed)} or None
    if all(all(listed) for listed in found.values()):
        return known
    held = {storage_of(tensor) for tensor in everything.tensors}
    for path, listed in found.items():
        pairs = zip(listed, optimizers[path], strict=True)
        lost = sum(not name and one.numel() > 0 and storage_of(one) not in held for name, one in pairs)
        if lost:
            log.note_once(
                f"lost {path}",
                "%d parameters of %s are in no part of the state: a restart has their optimizer state, not their "
                "values; give the engine the module that they belong to",
                lost,
                path,
            )
    return known
