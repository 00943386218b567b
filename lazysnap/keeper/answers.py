"""Answers questions to a keeper: its memory, the state of the job, and whether the keeper can end."""

import logging

from msgspec import structs

from lazysnap.core.core import Core
from lazysnap.core.node import whole_on_all
from lazysnap.keeper.connections import TrainerConnection, TrainerConnections
from lazysnap.keeper.event_log import EventLog
from lazysnap.keeper.node_state import node_state
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.questions import Answer, HeldParity, KeptMemory, Question
from lazysnap.keeper.slot_table import SlotTable

logger = logging.getLogger(__name__)


class Answers:
    """Answers questions, immediately or when the answer is known. Used on the loop's thread."""

    def __init__(
        self, core: Core, slots: SlotTable, connections: TrainerConnections, parity: ParityStore, log: EventLog
    ) -> None:
        self._core = core
        self._slots = slots
        self._connections = connections
        self._parity = parity
        self._log = log
        self._stops: list[tuple[TrainerConnection, Question]] = []
        """Questions whether the keeper can end, until they are answered."""
        self._must_end = False
        """True once such a question made the keeper end."""

    # Memory and state

    def memory(self, connection: TrainerConnection, question: Question) -> tuple[Answer, list[int]]:
        """Return the memory of a rank, with new descriptors of its slots. Its trainer needs none: it has writable ones.

        Raises: OSError, if there are no more descriptors.
        """
        rank = question.local_rank
        parity: list[HeldParity] = []
        if rank == 0:
            parity = self._parity.inventory()
        memory = KeptMemory(
            slots=self._slots.facts(rank),
            end=self._log.ends.get(rank),
            local_ranks=self._slots.ranks,
            parity=tuple(parity),
        )
        descriptors: list[int] = []
        if not self._is_trainer(connection, rank):
            descriptors = self._slots.reading_descriptors(rank, memory.slots)
        return Answer(number=question.number, memory=memory), descriptors

    def _is_trainer(self, connection: TrainerConnection, rank: int) -> bool:
        ranks = self._core.ranks.all
        return rank < len(ranks) and ranks[rank].connection == connection.number

    def status(self, question: Question) -> Answer:
        """Return the state of the node."""
        state = node_state(self._core, self._slots.by_rank, self._parity.size_bytes, self._log)
        return Answer(number=question.number, status=state)

    # The end

    def stop_asked(self, connection: TrainerConnection, question: Question) -> None:
        """Accept the question whether the keeper can end. It is answered later."""
        self._stops.append((connection, question))

    def decide_stop(self) -> bool:
        """Refuse the questions whether the keeper can end, if it must stay.

        Returns: True, once, if the keeper must end. ``finish`` then answers.
        """
        if self._must_end:
            if self._core.is_served:  # a trainer connected meanwhile
                self._must_end = False
                self._answer_stops(Answer(text=self._text_of_training()))
            return False
        # Without its client, a question does not count: the keeper decides by itself.
        self._stops = [stop for stop in self._stops if self._connections.is_open(stop[0])]
        if not self._stops:
            return False
        text = self._reason_to_stay()
        if text:
            self._answer_stops(Answer(text=text))
            return False
        self._must_end = self._is_all_stored()
        return self._must_end

    def finish(self) -> None:
        """Answer that the keeper ends, and which step is durable."""
        self._answer_stops(Answer(durable=self._durable_steps()))

    def _durable_steps(self) -> dict[str, int | None]:
        job = self._core.job
        steps: dict[str, int | None] = {}
        if job is not None:
            for settings, level in zip(job.settings.levels, job.node.levels, strict=False):
                newest = max(level.order.complete, default=None)
                steps[settings.url] = None if newest is None else newest.step
        return steps

    def _answer_stops(self, answer: Answer) -> None:
        for connection, question in self._stops:
            self._connections.answer(connection, structs.replace(answer, number=question.number))
        self._stops = []

    def _reason_to_stay(self) -> str:
        """Return the reason why the keeper does not end; empty if it ends, or that is not known yet."""
        if self._core.is_served:
            return self._text_of_training()
        job = self._core.job
        if self._is_all_stored():
            return ""
        if job is None:
            return (
                "it has captures, and no training has named the levels for them yet; start the training again "
                "(--force ends the keeper anyway and loses them)"
            )
        newest = max(whole_on_all(self._core.ranks.views(job.settings)), default=None)
        is_any_failing = False
        for level in job.node.storage:
            if newest is None or newest in level.order.complete:
                continue
            if not level.failure:
                return ""  # it is being stored
            is_any_failing = True
        if newest is None or not is_any_failing:
            return ""
        return (
            f"its newest capture, step {newest.step}, could not be stored at every level; repair the level and try "
            "again (--force ends it anyway and loses that capture)"
        )

    def _text_of_training(self) -> str:
        pid = next(rank.pid for rank in self._core.ranks.all if rank.is_served)
        return f"its training runs, process {pid}; end that first"

    def _is_all_stored(self) -> bool:
        """Return True if nothing is lost when the keeper ends now.

        With several nodes, a keeper whose memory waits for a restart would otherwise wait for the others.
        """
        job = self._core.job
        if job is None:
            return not any(slot.is_whole for rank in self._core.ranks.all for slot in rank.slots)
        return job.settings.num_nodes > 1 or job.node.order.is_drained
