"""All ranks read one snapshot: what each has found travels in DCP's plans, and the coordinator says which it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan

from lazysnap.errors import ConfigError
from lazysnap.resolver import RestartPlan


@dataclass(frozen=True, order=True)
class Identity:
    """What tells a snapshot from every other; the greater one is the newer one."""

    run_id: str
    step: int
    start: str
    world_size: int

    @classmethod
    def of(cls, plan: LoadPlan) -> "Identity":
        """The snapshot that ``plan`` is to be read from.

        Raises: ConfigError, if a planner dropped it: ranks could read different snapshots then.
        """
        if not isinstance(plan.storage_data, Identity):
            raise ConfigError(
                f"the planner dropped LoadPlan.storage_data (it holds {plan.storage_data!r:.50}); keep it: it says "
                "which snapshot the ranks agreed on"
            )
        return plan.storage_data


def identity_of(plan: RestartPlan) -> Identity:
    """Of a snapshot that was found."""
    return Identity(plan.run_id, plan.step, plan.start, plan.world_size)


def noted(plan: LoadPlan, identity: Identity) -> LoadPlan:
    """``plan`` with the snapshot that it is for."""
    data: Any = identity
    return replace(plan, storage_data=data)


def agree(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """One snapshot for all: the oldest of those found. What a rank found later, others may not see yet."""
    agreed = min(Identity.of(plan) for plan in plans)
    return [noted(plan, agreed) for plan in plans]
