"""Which captures a node holds for parity, and which step trainers know to be protected. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from lazysnap.keeper.granted import NodeLevel, RankView, common_whole


@dataclass
class HeldSteps:
    """Of one node, for one start. At most two steps of it, and what earlier starts held until this one protects one."""

    start: str
    level: NodeLevel
    """Its state for the grants of protection."""
    kept: int | None = None
    """The step whose slots and parity stay until a newer one is protected."""
    protected: int | None = None
    """The newest protected step, as trainers were told."""
    is_earlier_over: bool = False
    """Whether this start does without what earlier ones held, though it protected nothing."""

    def inherit(self, ranks: Sequence[RankView]) -> None:
        """Take over what a keeper before this one held of this start: of two steps the older one was protected."""
        self.kept = min((slot.step for rank in ranks for slot in rank.slots if slot.pin == slot.step), default=None)

    def stays(self, step: int | None, *, is_own: bool) -> bool:
        """Whether slots and parity of that step stay. ``is_own``: of this start."""
        if is_own:
            return step in (self.kept, self.level.grant)
        return self.kept is None and not self.is_earlier_over

    def learn(self) -> bool:
        """An order was obeyed; whether trainers are to be told."""
        before = self.protected
        self.protected = max((key.step for key in self.level.complete if key.start == self.start), default=None)
        # If parity was lost with a keeper, what is left of it is the best there is.
        self.kept = self.kept if self.protected is None else self.protected
        return self.protected != before

    def do_without(self, ranks: Sequence[RankView], num_kept: int) -> None:
        """There are too few slots to protect anything: held ones must not hold up captures, once there are enough."""
        self.is_earlier_over = len(common_whole(ranks)) >= num_kept

    def end(self) -> None:
        """This start is over. A step of which this node has its parity may be protected, as others know."""
        if self.level.grant not in self.level.stored:
            self.level.grant = None
