"""A trainer and a keeper that share slots, interleaved store by store, in one thread and from one source of chance.

The keeper's code runs as it is. Before each of its accesses to a word the trainer takes some of its own steps, and
each store of the trainer is a step of its own. Either may die between any two. Memory is in order here:
``weak_memory`` shows what a processor may do.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

from lazysnap.errors import FormatError
from lazysnap.shard.manifest import CaptureMeta

PIECE_BYTES = 8
MAX_PIECES = 3
MAX_POLLS = 60
TEMPOS = ((0,), (0, 0, 0, 1), (0, 0, 1, 3), (0, 0, 0, 0, 0, 0, 20), (0,) * 15 + (90,))
"""Steps of the trainer before an access of the keeper, by chance; another row for each act of the keeper."""


class Broken(AssertionError):
    """A promise was broken."""


class Cancelled(Exception):
    """The reader waited long enough."""


class KeeperDied(Exception):
    """The keeper was killed before an access."""


class Queued:
    """Memory of the trainer: its stores wait in a queue, to be applied one by one."""

    def __init__(self, cells: memoryview, queue: list) -> None:
        self._cells = cells
        self._queue = queue

    def __getitem__(self, index: int) -> int:
        return self._cells[index]

    def __setitem__(self, index: int | slice, value: int | bytes) -> None:
        self._queue.append((self._cells, index, value))


class Interrupted:
    """Words of the keeper: other processes run before each access."""

    def __init__(self, cells: memoryview, world: "World") -> None:
        self._cells = cells
        self._world = world

    def __getitem__(self, index: int) -> int:
        self._world.interrupt()
        return self._cells[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._world.interrupt()
        self._cells[index] = value


class World:
    """One rank with its slots."""

    def __init__(self, modules: SimpleNamespace, pick: Callable[[int], int]) -> None:
        """``pick``: returns a number below its argument."""
        self.modules = modules
        self.pick = pick
        self.kept = 1 + pick(2)
        modules.words.fence = _do_nothing
        modules.capture_reader._POLL_S = 0.0
        self.word = modules.words.SlotWord
        self.queue: list = []
        """Stores of the trainer that are not applied yet."""
        self.is_trainer_running = False
        self.num_starts = 0
        self.facts: dict[int, tuple[int, int, int]] = {}
        """Start, step and size of each capture, by its sequence number."""
        self.newest: list[int] = []
        """Sequence numbers of the whole captures that must be in memory, oldest first."""
        self.whole: set[int] = set()
        """Sequence numbers of all captures that became whole."""
        self.lost: set[int] = set()
        """Sequence numbers of captures that the trainer discarded, or left incomplete."""
        self.in_flight: int | None = None
        self.held: int | None = None
        """Sequence number of the capture that the keeper is sure to hold."""
        self.num_read = 0
        """Captures that the keeper read to their end."""
        self.tempo = TEMPOS[0]
        self.is_spare = self.pick(4) > 0
        num_slots = modules.slot_choice.slots_needed(self.kept, is_read=self.is_spare)
        self.keeper_slots = [modules.slots.make_slot(4096, 4096) for _ in range(num_slots)]
        self.raw = [slot._cells for slot in self.keeper_slots]
        self.images = []
        self.trainer_slots = []
        for slot in self.keeper_slots:
            trainer_slot = modules.slots.TrainerSlot.attach(os.dup(slot.descriptor))
            self.images.append(trainer_slot.image)
            trainer_slot._cells = Queued(trainer_slot._cells, self.queue)
            trainer_slot._meta = Queued(trainer_slot._meta, self.queue)
            self.trainer_slots.append(trainer_slot)
            slot._cells = Interrupted(slot._cells, self)
        self.trainer = self._train()

    def close(self) -> None:
        """Free the memory."""
        for slot in (*self.keeper_slots, *self.trainer_slots):
            os.close(slot.descriptor)

    def run(self, num_acts: int) -> None:
        """Let the keeper act so many times. Raises: Broken."""
        for _ in range(num_acts):
            try:
                self._keeper_act()
            except KeeperDied:
                self._replace_keeper()

    def _one_of(self, choices: Sequence) -> object:
        return choices[self.pick(len(choices))]

    def interrupt(self) -> None:
        """Let the trainer take some steps, before an access of the keeper."""
        if self.is_trainer_running:
            return
        for _ in range(self._one_of(self.tempo)):
            self._trainer_step()
        if self.pick(300) == 0:
            raise KeeperDied

    # The trainer

    def _trainer_step(self) -> None:
        self.is_trainer_running = True
        if self.pick(400) == 0:
            self._replace_trainer()
        next(self.trainer)
        self.is_trainer_running = False
        self._check()

    def _replace_trainer(self) -> None:
        """Kill the trainer; the keeper voids what is incomplete before the next one comes."""
        self.trainer.close()
        self.queue.clear()
        if self.in_flight is not None:
            self.lost.add(self.in_flight)
            self.in_flight = None
        for cells in self.raw:
            if cells[self.word.BEGIN] and cells[self.word.END] != cells[self.word.BEGIN]:
                cells[self.word.VOID] = cells[self.word.SEQUENCE]
        self.trainer = self._train()

    def _train(self) -> Iterator[None]:
        self.num_starts += 1
        if self.num_starts > 1 and self.pick(2):
            yield from self._discard_newest()
        while True:
            yield from self._capture()

    def _discard_newest(self) -> Iterator[None]:
        """Discard what is newer than the snapshot that was restored."""
        if not self.newest:
            return
        sequence = self.newest[-1]
        self.lost.add(sequence)
        for slot in self.trainer_slots:
            for _ in self._stores(lambda slot=slot: slot.discard(sequence)):
                if sequence in self.newest:
                    self.newest.remove(sequence)
                yield

    def _capture(self) -> Iterator[None]:
        views = [slot.view() for slot in self.trainer_slots]
        choice = self.modules.slot_choice.choose_slot(views, self.kept, image_bytes=64, meta_bytes=64)
        if choice is None:
            if self.is_spare:
                raise Broken("training waits for a slot")
            yield
            return
        [slot] = [slot for slot in self.trainer_slots if slot.slot_id == choice.slot_id]
        for _ in range(self.pick(20)):  # it writes metadata meanwhile
            yield
        if self.held is not None and choice.sequence == self.held and self.held not in self.lost:
            raise Broken(f"capture {self.held} is held, and written over")
        sequence = 1 + max(view.sequence for view in views)
        step = self.pick(2)  # the same step comes again, as after a rollback
        pieces = 1 + self.pick(MAX_PIECES)
        meta = CaptureMeta("0" * 16, f"{self.num_starts:016x}", step, 0, 1, captured_ns=sequence).to_bytes()
        size_bytes = pieces * PIECE_BYTES
        self.in_flight = sequence
        self.facts[sequence] = (self.num_starts, step, size_bytes)
        yield from self._stores(
            lambda: slot.begin(self.num_starts, step, sequence=sequence, image_bytes=size_bytes, meta=meta)
        )
        for piece in range(pieces):
            start = piece * PIECE_BYTES
            slot.image[start : start + PIECE_BYTES] = piece_of(sequence)
            yield
            yield from self._stores(lambda stop=start + PIECE_BYTES: slot.advance(stop))
        if self.pick(6) == 0:
            self.lost.add(sequence)
            yield from self._stores(lambda: slot.discard(sequence))
            self.in_flight = None
        else:
            for _ in self._stores(lambda: slot.commit(copied_ns=1)):
                if slot.load(self.word.END):
                    self.newest = [*self.newest, sequence][-self.kept :]
                    self.whole.add(sequence)
                    self.in_flight = None
                yield

    def _stores(self, operation: Callable[[], object]) -> Iterator[None]:
        """Apply the stores of an operation one by one."""
        operation()
        stores = list(self.queue)
        self.queue.clear()
        for cells, index, value in stores:
            cells[index] = value
            yield

    def _check(self) -> None:
        """Raise Broken if memory lacks one of the newest captures, or has one that is not what it seems."""
        whole = set()
        for cells, image in zip(self.raw, self.images, strict=True):
            if cells[self.word.BEGIN] == 0 or cells[self.word.END] != cells[self.word.BEGIN]:
                continue
            sequence = cells[self.word.SEQUENCE]
            size_bytes = cells[self.word.IMAGE_BYTES]
            if image[:size_bytes] != piece_of(sequence) * (size_bytes // PIECE_BYTES):
                raise Broken(f"capture {sequence} is torn and seems whole")
            whole.add(sequence)
        for sequence in self.newest:
            if sequence not in whole:
                raise Broken(f"capture {sequence} is one of the newest and was written over")

    # The keeper

    def _keeper_act(self) -> None:
        self.tempo = self._one_of(TEMPOS)
        readable = [(slot, view) for slot, view in self._look() if self._is_readable(view)]
        if not readable:
            return
        newest = max(readable, key=lambda look: look[1].sequence)  # it is often incomplete
        slot, view = self._one_of([*readable, newest, newest])
        is_held = False
        if self.pick(4):
            is_held = slot.hold(view.sequence, self.keeper_slots, self.kept)
            if not is_held:
                return
            self.held = view.sequence
        try:
            data, meta = self._read(slot, view.sequence)
        except Cancelled:
            pass
        except self.modules.capture_reader.CaptureAborted as error:
            if is_held and view.sequence not in self.lost:
                raise Broken(f"capture {view.sequence} was held") from error
        except FormatError as error:
            raise Broken(f"capture {view.sequence} seems damaged") from error
        else:
            self._compare(view.sequence, data, meta)
        self.held = None
        slot.release()

    def _look(self) -> list[tuple[object, object]]:
        """Return all slots with their words. Raises: Broken, if those are of several captures."""
        looks = []
        for slot in self.keeper_slots:
            view = slot.view()
            if self._is_readable(view) and (view.start, view.step, view.image_bytes) != self.facts[view.sequence]:
                raise Broken(f"words of capture {view.sequence} and of another one")
            looks.append((slot, view))
        return looks

    def _is_readable(self, view: object) -> bool:
        phases = self.modules.slot_choice.SlotPhase
        return view.phase in (phases.CAPTURING, phases.WHOLE)

    def _read(self, slot: object, sequence: int) -> tuple[bytes, CaptureMeta]:
        num_polls = 0
        num_vain_polls = 0
        cells = self.raw[self.keeper_slots.index(slot)]

        def beat() -> None:
            nonlocal num_polls, num_vain_polls
            num_polls += 1
            num_vain_polls += cells[self.word.BEGIN] == 0
            if num_vain_polls > 2:  # once it may have been discarded while the words were read
                raise Broken(f"the reader waits for capture {sequence}, which is discarded")
            if num_polls > MAX_POLLS:
                raise Cancelled
            for _ in range(1 + self.pick(3)):
                self._trainer_step()

        reader = self.modules.capture_reader.CaptureReader(slot, sequence, beat)
        pieces = []
        for offset in range(0, reader.size_bytes, PIECE_BYTES):
            view = reader.view(offset, PIECE_BYTES)
            self.interrupt()
            pieces.append(bytes(view))
        reader.finish()
        return b"".join(pieces), reader.meta

    def _compare(self, sequence: int, data: bytes, meta: CaptureMeta) -> None:
        self.num_read += 1
        if sequence not in self.whole:
            raise Broken(f"capture {sequence} was read and is not whole")
        if not data or data != piece_of(sequence) * (len(data) // PIECE_BYTES):
            raise Broken(f"capture {sequence} was read as another one")
        if meta.captured_ns != sequence:
            raise Broken(f"capture {sequence} was read with the metadata of {meta.captured_ns}")

    def _replace_keeper(self) -> None:
        """A new keeper holds nothing."""
        self.held = None
        for cells in self.raw:
            cells[self.word.HELD] = 0


def _do_nothing() -> None:
    """Nothing is out of order here."""


def piece_of(sequence: int) -> bytes:
    """Return the bytes that a capture consists of."""
    return sequence.to_bytes(PIECE_BYTES, "little")
