"""The word that ranks change to agree on a snapshot that all have (docs/architecture.md, "Explicit agreement")."""

from dataclasses import dataclass

NONE = -1
"""In place of a step: nothing was agreed on yet."""
_MOST_LEAD = 16


@dataclass(frozen=True)
class Ballot:
    """One state of it. ``agreed`` and ``candidate`` never fall, so each state is there once at most."""

    agreed: int
    """The step that is whole on every rank; ``NONE`` before there is one."""
    candidate: int
    """The step that all are to have next."""
    lead: int
    """How far ahead candidates are called, as a power of two of captures: all have to hear of one before it comes."""

    @classmethod
    def of(cls, text: str) -> "Ballot":
        """Raises: ValueError."""
        agreed, candidate, lead = map(int, text.split())
        return cls(agreed, candidate, lead)

    def __str__(self) -> str:
        return f"{self.agreed} {self.candidate} {self.lead}"

    def raised(self, passed: int, every: int, *, is_late: bool) -> "Ballot":
        """Not this candidate: a later one, by a rank that is past step ``passed``. ``is_late``: it heard too late of
        this one, so candidates are to be called sooner.
        """
        lead = min(self.lead + is_late, _MOST_LEAD)
        return Ballot(self.agreed, max(self.candidate + every, next_candidate(passed, every, lead)), lead)

    def carried(self, passed: int, every: int) -> "Ballot":
        """The candidate is whole on all ranks: agreed, and the next one."""
        lead = max(self.lead - 1, 0)
        return Ballot(self.candidate, max(self.candidate + every, next_candidate(passed, every, lead)), lead)


def next_candidate(passed: int, every: int, lead: int) -> int:
    """A step that all ranks capture, ahead of ``passed``."""
    return (passed // every + (1 << lead)) * every
