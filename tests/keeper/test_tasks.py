"""What the thread of a level does, on real slots and real directories: list, write, copy, read back, delete, name."""

import contextlib
import errno
import os
import pathlib
import threading
import weakref
from dataclasses import dataclass, replace

import pytest
from support.damage import flip
from support.listing import files_below
from support.place import pattern
from support.snapshots import Snapshot
from support.waiting import TIMEOUT_S

from lazysnap.core.actions import (
    DeleteFiles,
    Failed,
    Listed,
    ListLevel,
    Missed,
    ProbeLevel,
    SetNames,
    StepStored,
    TaskEnded,
    TaskMoved,
    WriteLevel,
)
from lazysnap.core.messages import JobSettings, LevelSettings, NamedStep, StepKey
from lazysnap.errors import FormatError
from lazysnap.keeper.level_files import LevelFiles
from lazysnap.keeper.tasks import TaskControl, run_level_task
from lazysnap.levels.blocks import FileBlocks, verify
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.store import open_storage
from lazysnap.memory.slots import TrainerSlot, make_slot
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.names import NodeName, SnapshotName

RUN = "ab" * 8
OTHER_RUN = "cd" * 8
FIRST = 0x1
START = 0x19A0000000000002
ROWS = 75_000
FILE = "node-00000-of-00001.safetensors"
MANIFEST = "node-00000-of-00001.json"


def key_of(step, start=START):
    return StepKey(start, step)


def directory_of(step, start=START, run=RUN):
    return SnapshotName(run, step, f"{start:016x}").directory


def image_of(step, rank=0):
    layout = Layout.plan([TensorSpec("x", "U8", (ROWS, 4))])
    return layout.header + pattern(4 * ROWS, 1000 * step + rank)


@dataclass
class Capture:
    """One capture of one rank in a slot of its own."""

    step: int
    rank: int = 0
    world_size: int = 1
    start: int = START
    run: str = RUN
    sequence: int = 1
    shared_rows: tuple[int, int] | None = None

    @property
    def meta(self):
        tensors = {}
        if self.shared_rows is not None:
            facts = {"scope": "full", "global_shape": [ROWS, 4], "offsets": [0, 0]}
            tensors["x"] = {**facts, "shared_rows": list(self.shared_rows)}
        return CaptureMeta(
            self.run, f"{self.start:016x}", self.step, self.rank, self.world_size, captured_ns=3, tensors=tensors
        )


class Node:
    """The keeper's slots of the ranks of one node, and the trainers' ends of them."""

    def __init__(self):
        self.slots = {}
        self._trainers = {}

    def capture(self, capture, *, local_rank=0, is_whole=True):
        """Capture into a new slot. Return local rank and slot id, as a task names it."""
        keeper_slot = make_slot(1 << 16, len(image_of(0)))
        self.slots.setdefault(local_rank, {})[keeper_slot.slot_id] = keeper_slot
        self._trainers[keeper_slot.slot_id] = TrainerSlot.attach(os.dup(keeper_slot.descriptor))
        self.capture_again(keeper_slot.slot_id, capture, is_whole=is_whole)
        return local_rank, keeper_slot.slot_id

    def capture_again(self, slot_id, capture, *, is_whole=True):
        """Write over a slot."""
        image = image_of(capture.step, capture.rank)
        slot = self._trainers[slot_id]
        slot.begin(
            capture.start,
            capture.step,
            sequence=capture.sequence,
            image_bytes=len(image),
            meta=capture.meta.to_bytes(),
        )
        if is_whole:
            self.fill(slot_id, image)
        return slot

    def fill(self, slot_id, image):
        slot = self._trainers[slot_id]
        slot.image[: len(image)] = image
        slot.commit(copied_ns=1)

    def close(self):
        for slot in self._trainers.values():
            slot.close()
        for slots in self.slots.values():
            for slot in slots.values():
                slot.close()


@pytest.fixture
def node():
    with contextlib.closing(Node()) as made:
        yield made


class Rig:
    """The levels of one node."""

    def __init__(self, root, *levels, **job):
        self.root = root
        self.settings = JobSettings(RUN, levels, **job)
        self.files = []
        for index in range(len(levels)):
            self.files.append(LevelFiles(self.settings, index, tuple(self.files)))
        self.events = []
        self.control = None

    def run(self, task, node=None, control=None):
        self.control = control or TaskControl(task, self.events.append)
        return run_level_task(task, self.files[task.level], {} if node is None else node.slots, self.control)

    def write(self, node, capture, level=0, **facts):
        """Capture a step, and store it."""
        place = node.capture(capture)
        return self.run(WriteLevel(level, 1, key_of(capture.step, capture.start), (place,), **facts), node)

    def list(self, level=0):
        return self.run(ListLevel(level, 9))

    def delete(self, *keys, level=0):
        assert self.run(DeleteFiles(level, 9, keys)) == TaskEnded(9)

    def path(self, step, level=0, start=START, run=RUN):
        return pathlib.Path(self.settings.levels[level].url) / directory_of(step, start, run)


@pytest.fixture
def rig(tmp_path):
    """``rig("a", "b", ranks=(0, 1))``: levels in these directories; a level may be ``LevelSettings``."""

    def make(*levels, **job):
        settings = []
        for level in levels or ("level",):
            is_name = isinstance(level, str)
            settings.append(LevelSettings(str(tmp_path / level)) if is_name else level)
        return Rig(tmp_path, *settings, **job)

    return make


def bytes_at(path, name=NodeName(0, 1)):  # noqa: B008  frozen
    """The bytes of a committed file, read as a restart does."""
    storage = open_storage(str(path.parent))
    verify(FilePlace(storage, path.name, name))
    return (path / name.file).read_bytes()


def shard_at(path, rank, name):
    """The bytes of one shard of a file."""
    storage = open_storage(str(path.parent))
    shard = verify(FilePlace(storage, path.name, name)).of(rank)
    return (path / name.file).read_bytes()[shard.offset : shard.offset + shard.size_bytes]


# ---------------------------------------------------------------- write


def test_what_is_written_is_what_the_slot_holds_and_is_listed(rig, node):
    level = rig()

    ended = level.write(node, Capture(7))

    assert isinstance(ended, StepStored)
    assert (ended.number, ended.written_bytes) == (1, len(image_of(7)))
    assert ended.seconds > 0
    assert bytes_at(level.path(7)) == image_of(7)
    assert level.control.moved_bytes == len(image_of(7))
    assert rig().list() == Listed(9, (key_of(7),))


def test_what_was_committed_already_is_not_written_again(rig, node):
    rig().write(node, Capture(7))

    ended = rig().write(node, Capture(7))

    assert isinstance(ended, StepStored)
    assert ended.written_bytes == 0
    assert bytes_at(rig().path(7)) == image_of(7)


def test_the_checksums_of_a_file_that_is_the_image_are_those_of_the_capture(rig, node):
    level = rig()
    _, slot_id = node.capture(Capture(7, sequence=5))

    level.run(WriteLevel(0, 1, key_of(7), ((0, slot_id),)), node)

    checksums = level.control.checksums[slot_id, 5]
    assert checksums.whole == Checksums.of(memoryview(image_of(7))).whole


def test_a_capture_is_written_while_it_is_copied(rig, node):
    level = rig()
    place = node.capture(Capture(7), is_whole=False)
    control = TaskControl(WriteLevel(0, 1, key_of(7), (place,)), level.events.append)
    waits = threading.Event()
    beat = control.beat

    def noted_beat():
        waits.set()
        beat()

    control.beat = noted_beat
    ended = []
    task = WriteLevel(0, 1, key_of(7), (place,))
    thread = threading.Thread(target=lambda: ended.append(level.run(task, node, control)))
    thread.start()
    assert waits.wait(TIMEOUT_S)
    node.fill(place[1], image_of(7))
    thread.join(TIMEOUT_S)

    assert isinstance(ended[0], StepStored)
    assert bytes_at(level.path(7)) == image_of(7)


def test_several_ranks_make_one_file(rig, node):
    level = rig(ranks=(4, 5), world_size=6, node=1, num_nodes=3)
    places = [node.capture(Capture(7, rank, world_size=6), local_rank=rank - 4) for rank in (4, 5)]

    ended = level.run(WriteLevel(0, 1, key_of(7), tuple(places)), node)

    assert isinstance(ended, StepStored)
    name = NodeName(1, 3)
    assert sorted(os.listdir(level.path(7))) == [name.manifest, name.file]
    for rank in (4, 5):
        assert shard_at(level.path(7), rank, name) == image_of(7, rank)
    assert level.control.checksums == {}, "no image is the file"
    assert level.list().stored == (key_of(7),)


@pytest.mark.parametrize("source", [None, 0])
def test_of_rows_that_all_nodes_hold_a_shared_level_gets_the_share_of_the_node(rig, node, tmp_path, source):
    """Also where it copies them from a level that is not shared, and so has them all."""
    own_disk = LevelSettings(str(tmp_path / "own"), is_shared=False)
    level = rig(own_disk, "all", num_nodes=2, world_size=2)
    capture = Capture(7, world_size=2, shared_rows=(0, 10))
    assert isinstance(level.write(node, capture), StepStored)
    place = () if source is not None else (node.capture(capture),)

    ended = level.run(WriteLevel(1, 2, key_of(7), place, source), node)

    assert isinstance(ended, StepStored)
    assert bytes_at(level.path(7), NodeName(0, 2)) == image_of(7)
    stored = bytes_at(level.path(7, level=1), NodeName(0, 2))
    assert len(stored) < len(image_of(7)) / 2
    assert stored.endswith(pattern(4 * ROWS, 7000)[:40])


def test_what_a_shared_level_has_of_one_node_is_not_copied_to_a_disk_of_its_own(rig, node, tmp_path):
    level = rig("all", LevelSettings(str(tmp_path / "own"), is_shared=False), num_nodes=2, world_size=2)
    level.write(node, Capture(7, world_size=2))

    ended = level.run(WriteLevel(1, 2, key_of(7), (), 0))

    assert isinstance(ended, Missed)
    assert "share alone" in ended.text


def test_a_step_that_is_there_is_not_written_again(rig, node, passing):
    level = rig()
    level.write(node, Capture(7))
    passed = []
    passing(passed.append)

    assert isinstance(rig().write(node, Capture(7)), StepStored)
    assert "level.store.begin" not in passed
    assert "keeper.persist.verified" in passed


def test_the_capture_of_an_earlier_run_is_stored_under_that_run(rig, node):
    """Memory may hold it when the next start begins a new run."""
    level = rig()

    ended = level.write(node, Capture(7, start=FIRST, run=OTHER_RUN))

    assert isinstance(ended, StepStored)
    assert bytes_at(level.path(7, start=FIRST, run=OTHER_RUN)) == image_of(7)
    assert level.list().stored == ()
    level.delete(key_of(7, FIRST))
    assert files_below(level.root) == []


@pytest.mark.parametrize(
    ("capture", "said"),
    [
        (Capture(8), "not in memory any more"),
        (Capture(7, start=FIRST), "not in memory any more"),
        (Capture(7, rank=1, world_size=2), "holds rank 1 of 2"),
        (Capture(7, world_size=2), "holds rank 0 of 2"),
    ],
    ids=["another step", "another start", "another rank", "another world"],
)
def test_a_slot_that_holds_something_else_is_missed_and_nothing_is_written(rig, node, capture, said):
    level = rig()

    ended = level.run(WriteLevel(0, 1, key_of(7), (node.capture(capture),)), node)

    assert isinstance(ended, Missed)
    assert said in ended.text
    assert files_below(level.root) == []


def test_slots_that_are_gone_are_missed(rig, node):
    level = rig()

    _, slot_id = node.capture(Capture(7))
    for place in ((0, 12345), (1, slot_id)):
        assert isinstance(level.run(WriteLevel(0, 1, key_of(7), (place,)), node), Missed)


def test_a_capture_that_is_written_over_while_it_is_read_is_missed(rig, node, passing):
    level = rig()
    place = node.capture(Capture(7))

    def write_over(name):
        if name == "level.store.publish_shard":
            raise AssertionError("it was torn")
        if name == "level.local.write":
            node.capture_again(place[1], Capture(8, sequence=2))

    passing(write_over)
    ended = level.run(WriteLevel(0, 1, key_of(7), (place,)), node)

    assert isinstance(ended, Missed)
    assert files_below(level.root) == []


def test_a_job_goes_on_reading_a_slot_that_the_loop_freed(rig, node, passing):
    level = rig()
    place = node.capture(Capture(7))

    def free(name):
        if name == "level.store.begin":
            slot = node.slots[0].pop(place[1])
            weakref.finalize(slot, os.close, slot.descriptor)  # as ``SlotTable.free`` does

    passing(free)

    assert isinstance(level.run(WriteLevel(0, 1, key_of(7), (place,)), node), StepStored)
    assert bytes_at(level.path(7)) == image_of(7)


# ---------------------------------------------------------------- cancelled, damaged, refused


@pytest.mark.parametrize(
    "point", ["keeper.persist.begin", "level.store.begin", "level.store.publish_shard", "level.store.commit"]
)
def test_a_job_that_is_cancelled_before_the_commit_commits_nothing(rig, node, passing, point):
    level = rig()
    level.list()

    def cancel(name):
        if name == point:
            level.control.is_cancelled = True

    passing(cancel)
    place = node.capture(Capture(7))
    task = WriteLevel(0, 1, key_of(7), (place,))

    ended = level.run(task, node)

    assert isinstance(ended, Missed)
    assert "cancelled" in ended.text
    assert files_below(level.root, "*.json") == []
    level.delete(key_of(7))
    assert files_below(level.root) == []
    assert not level.path(7).exists()


def test_a_job_that_is_cancelled_while_it_is_read_back_is_missed_and_deleted_afterwards(rig, node, passing):
    level = rig()

    def cancel(name):
        if name == "keeper.persist.committed":
            level.control.is_cancelled = True

    passing(cancel)
    assert isinstance(level.write(node, Capture(7)), Missed)

    level.delete(key_of(7))
    assert files_below(level.root) == []


def test_a_file_that_is_read_back_damaged_is_no_snapshot_and_goes(rig, node, passing):
    level = rig()
    level.write(node, Capture(5))

    def damage(name):
        if name == "keeper.persist.committed":
            flip(level.path(7) / FILE)

    passing(damage)
    ended = level.write(node, Capture(7))

    assert isinstance(ended, Failed)
    assert "step 7: it was read back damaged" in ended.text
    assert level.list() == Listed(9, (key_of(5),))
    assert not level.path(7).exists()


def test_a_level_that_refuses_fails_and_comes_back(rig, node, tmp_path):
    level = rig()
    (tmp_path / "level").write_text("in the way")

    for task in (ListLevel(0, 1), ProbeLevel(0, 2), WriteLevel(0, 3, key_of(7), (node.capture(Capture(7)),))):
        ended = level.run(task, node)
        assert isinstance(ended, Failed), task
        assert ended.number == task.number
        assert str(tmp_path / "level") in ended.text
    (tmp_path / "level").unlink()

    assert level.run(ProbeLevel(0, 4)) == TaskEnded(4)
    assert isinstance(level.write(node, Capture(7)), StepStored)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "injected"), ValueError("of a package"), KeyError()])
def test_no_error_of_a_storage_ends_the_thread(rig, node, passing, error):
    level = rig()

    def fail(name):
        if name == "level.store.commit":
            raise error

    passing(fail)
    ended = level.write(node, Capture(7))

    assert isinstance(ended, Failed)
    assert ended.text
    assert files_below(level.root) == []


def test_a_full_disk_is_told_with_what_to_do(rig, node, passing):
    level = rig()

    def fail(name):
        if name == "level.store.begin":
            raise OSError(errno.ENOSPC, "No space left on device")

    passing(fail)

    assert "free space there or lower keep_last" in level.write(node, Capture(7)).text


def test_a_job_that_waits_for_a_bound_of_bytes_moves_meanwhile(rig, node, tmp_path):
    level = rig(LevelSettings(str(tmp_path / "level"), max_bytes_per_s=400_000))
    level.write(node, Capture(5))

    assert isinstance(level.write(node, Capture(6)), StepStored)

    assert 1 in {event.number for event in level.events if isinstance(event, TaskMoved)}


# ---------------------------------------------------------------- copy


def test_a_slower_level_copies_what_the_faster_one_has(rig, node):
    level = rig("fast", "slow")
    level.write(node, Capture(7))

    ended = level.run(WriteLevel(1, 2, key_of(7), (), 0))

    assert isinstance(ended, StepStored)
    assert bytes_at(level.path(7, level=1)) == image_of(7)
    assert (level.path(7, level=1) / FILE).stat().st_ino != (level.path(7) / FILE).stat().st_ino


def test_a_source_that_goes_while_it_is_copied_is_copied(rig, node, passing):
    level = rig("fast", "slow")
    level.write(node, Capture(7))

    def delete(name):
        if name == "level.store.begin":
            for path in (MANIFEST, FILE):
                (level.path(7) / path).unlink()

    passing(delete)

    assert isinstance(level.run(WriteLevel(1, 2, key_of(7), (), 0)), StepStored)
    assert bytes_at(level.path(7, level=1)) == image_of(7)


@pytest.mark.parametrize("how", ["damaged", "truncated", "no manifest", "nothing"])
def test_a_source_that_is_not_whole_is_missed_and_the_level_is_well(rig, node, how):
    level = rig("fast", "slow")
    level.write(node, Capture(7))
    path = level.path(7)
    if how == "damaged":
        flip(path / FILE)
    elif how == "truncated":
        os.truncate(path / FILE, 5000)
    elif how == "no manifest":
        (path / MANIFEST).unlink()
    else:
        level.delete(key_of(7))

    ended = level.run(WriteLevel(1, 2, key_of(7), (), 0))

    assert isinstance(ended, Missed), ended
    assert files_below(level.root / "slow") == []


# ---------------------------------------------------------------- list


def write_elsewhere(root, step, rank=0, world_size=1, start=START, run=RUN):
    """The file of a node with one rank of another team."""
    Snapshot(step, run, rank=rank, world_size=world_size, start=f"{start:016x}").write(open_storage(str(root)))


def test_snapshots_of_all_starts_of_the_run_are_listed_and_no_others(rig, node):
    level = rig()
    level.write(node, Capture(7))
    level.write(node, Capture(9, start=FIRST))
    level.write(node, Capture(3, run=OTHER_RUN))
    (level.path(7).parent / "step-mine").mkdir()

    assert rig().list().stored == (key_of(9, FIRST), key_of(7))


def test_a_file_without_manifest_or_of_another_size_is_not_stored(rig, node, caplog):
    level = rig()
    for step in (1, 2, 3, 4, 5):
        level.write(node, Capture(step))
    (level.path(1) / MANIFEST).unlink()
    os.truncate(level.path(2) / FILE, 5000)
    (level.path(3) / FILE).unlink()
    (level.path(4) / MANIFEST).write_text("{}")

    listed = rig().list()

    assert listed.stored == (key_of(5),)
    assert listed.leftovers == (key_of(1),)
    assert caplog.text.count("does not count") == 3


def test_a_level_that_is_not_there_yet_is_empty(rig):
    level = rig()

    assert level.list() == Listed(9, ())
    assert files_below(level.root) == []


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_another_team_stored_counts_if_all_of_it_is_there(rig, tmp_path, num_nodes):
    root = tmp_path / "level"
    for step, ranks in ((1, range(4)), (2, range(3)), (3, range(4))):
        for rank in ranks:
            write_elsewhere(root, step, rank, world_size=4)
    os.truncate(root / directory_of(3) / "node-00002-of-00004.safetensors", 100)

    job = {"world_size": num_nodes, "num_nodes": num_nodes}
    stored = [rig(ranks=(number,), node=number, **job).list().stored for number in range(num_nodes)]

    assert set.intersection(*map(set, stored)) == {key_of(1)}
    assert all(key_of(2) not in keys for keys in stored)


def test_what_another_team_stored_on_a_disk_of_this_node_does_not_count_and_may_be_deleted(rig, tmp_path):
    level = rig(LevelSettings(str(tmp_path / "level"), is_shared=False), num_nodes=2, world_size=2)
    for rank in range(4):
        write_elsewhere(tmp_path / "level", 1, rank, world_size=4)

    assert level.list() == Listed(9, (), unusable=(key_of(1),))
    level.delete(key_of(1))
    assert files_below(level.root) == []


def test_a_file_of_this_nodes_name_with_other_ranks_is_another_teams(rig, node):
    rig(ranks=(0,), world_size=1).write(node, Capture(7))

    more_ranks = rig(ranks=(0, 1), world_size=2)
    assert more_ranks.list().stored == (key_of(7),)
    more_ranks.delete(key_of(7))
    assert files_below(more_ranks.root) == []


@pytest.mark.usefixtures("a_day_later")
def test_the_first_job_removes_what_dead_writers_left_and_no_later_one(rig):
    level = rig()
    path = level.path(7)
    path.mkdir(parents=True)
    (path / FILE).write_bytes(b"half")
    level.list()
    assert not path.exists()

    path.mkdir(parents=True)
    (path / FILE).write_bytes(b"half")
    level.list()
    assert (path / FILE).exists()


# ---------------------------------------------------------------- delete


def test_all_that_a_job_names_goes_and_nothing_else(rig, node):
    level = rig()
    for step in (1, 2, 3):
        level.write(node, Capture(step))

    level.delete(key_of(1), key_of(3), key_of(99))

    assert sorted(os.listdir(level.root / "level")) == [directory_of(2)]
    assert bytes_at(level.path(2)) == image_of(2)


def test_manifests_go_first(rig, node, passing):
    level = rig()
    level.write(node, Capture(7))
    seen = []

    def note(name):
        if name == "level.store.uncommitted":
            seen.append(os.listdir(level.path(7)))

    passing(note)
    level.delete(key_of(7))

    assert seen == [[FILE]]


@pytest.mark.parametrize("name", ["notes.txt", f"{FILE}.txt", "node-00003-of-00002.safetensors", ".nfs0021"])
def test_files_of_others_stay_beside_what_is_deleted(rig, node, name):
    level = rig()
    level.write(node, Capture(7))
    (level.path(7) / name).write_text("years of work")

    level.delete(key_of(7))

    assert os.listdir(level.path(7)) == [name]


@pytest.mark.parametrize("content", [RUN, "years of work"])
def test_what_has_a_name_stays(rig, node, content):
    """In doubt a name protects."""
    level = rig()
    level.write(node, Capture(7))
    (level.path(7) / "keep-best").write_text(content)

    level.delete(key_of(7))

    assert bytes_at(level.path(7)) == image_of(7)


@pytest.mark.parametrize("is_file", [False, True])
def test_nothing_is_deleted_through_a_link(rig, node, tmp_path, is_file):
    level = rig()
    level.write(node, Capture(7))
    path = level.path(7) / FILE if is_file else level.path(7)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    before = {file: file.read_bytes() for file in files_below(tmp_path)}

    level.delete(key_of(7))

    assert {file: file.read_bytes() for file in files_below(tmp_path)} == before


def test_each_node_deletes_its_own_files_and_its_share_of_those_of_an_earlier_team(rig, tmp_path):
    root = tmp_path / "level"
    nodes = [rig(ranks=(number,), world_size=2, node=number, num_nodes=2) for number in range(2)]
    for rank in range(5):
        write_elsewhere(root, 1, rank, world_size=5, start=FIRST)
    for rank in range(2):
        write_elsewhere(root, 1, rank, world_size=2)

    nodes[1].delete(key_of(1, FIRST), key_of(1))

    files = [path.name for path in files_below(root, "*.safetensors")]
    assert files == [
        *(f"node-0000{number}-of-00005.safetensors" for number in (0, 2, 4)),
        "node-00000-of-00002.safetensors",
    ]
    nodes[0].delete(key_of(1, FIRST), key_of(1))
    assert files_below(root) == []


def test_a_file_that_somebody_is_copying_there_stays_for_a_day(rig, monkeypatch):
    level = rig()
    level.list()
    level.path(7).mkdir(parents=True)
    (level.path(7) / FILE).write_bytes(b"the first half")

    assert level.list().leftovers == (key_of(7),)
    level.delete(key_of(7))
    assert (level.path(7) / FILE).exists()

    monkeypatch.setattr("lazysnap.levels.storage.Storage.abandoned_after_s", -3600.0)
    level.delete(key_of(7))
    assert not level.path(7).exists()


def test_a_level_that_does_not_answer_fails_to_delete(rig, node, tmp_path):
    level = rig()
    level.write(node, Capture(7))
    (tmp_path / "level").rename(tmp_path / "away")
    (tmp_path / "level").write_text("in the way")

    assert isinstance(level.run(DeleteFiles(0, 5, (key_of(7),))), Failed)


# ---------------------------------------------------------------- names


def test_names_are_given_listed_and_taken_away(rig, node):
    level = rig()
    for step in (1, 2):
        level.write(node, Capture(step))
    first, second = (NamedStep(name, key_of(step)) for name, step in (("first", 1), ("second", 2)))

    assert level.run(SetNames(0, 5, (first, second), ())) == TaskEnded(5)
    assert rig().list().names == (first, second)
    assert (level.path(1) / "keep-first").read_text() == RUN

    assert level.run(SetNames(0, 6, (NamedStep("third", key_of(2)),), (first,))) == TaskEnded(6)
    assert [named.name for named in level.list().names] == ["second", "third"]


def test_a_name_is_taken_from_the_given_snapshots_and_from_no_other(rig, node):
    level = rig()
    level.write(node, Capture(1))
    level.write(node, Capture(1, start=FIRST))
    level.write(node, Capture(2))
    level.write(node, Capture(3, run=OTHER_RUN))
    older = (NamedStep("best", key_of(1)), NamedStep("best", key_of(1, FIRST)))
    newest = NamedStep("best", key_of(2))
    level.run(SetNames(0, 5, (*older, newest), ()))
    (level.path(3, run=OTHER_RUN) / "keep-best").write_text(OTHER_RUN)

    level.run(SetNames(0, 6, (), older))

    assert level.list().names == (newest,)
    assert (level.path(3, run=OTHER_RUN) / "keep-best").exists()


def test_a_file_of_another_program_that_has_the_name_stays_and_is_an_error_and_other_names_are_given(rig, node, caplog):
    level = rig()
    level.write(node, Capture(1))
    (level.path(1) / "keep-mine").write_text("not ours")
    other = NamedStep("other", key_of(1))

    ended = level.run(SetNames(0, 5, (NamedStep("mine", key_of(1)), other), ()))

    assert ended == TaskEnded(5)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "use another name" in record.getMessage()
    assert level.list().names == (other,)
    assert (level.path(1) / "keep-mine").read_text() == "not ours"


def test_a_name_that_cannot_be_given_now_fails(rig, node, passing):
    level = rig()
    level.write(node, Capture(1))

    def fail(name):
        if name == "level.local.create":
            raise OSError("injected")

    passing(fail)

    assert isinstance(level.run(SetNames(0, 5, (NamedStep("best", key_of(1)),), ())), Failed)


def test_names_are_the_matter_of_node_0(rig, node, tmp_path):
    """Another node would take one for given that node 0 has taken away since."""
    nodes = [rig(ranks=(number,), world_size=2, node=number, num_nodes=2) for number in range(2)]
    for rank in range(2):
        write_elsewhere(tmp_path / "level", 1, rank, world_size=2)
    named = NamedStep("best", key_of(1))
    nodes[0].run(SetNames(0, 5, (named,), ()))

    assert nodes[0].list() == Listed(9, (key_of(1),), (), (named,))
    assert nodes[1].list() == Listed(9, (key_of(1),))


# ---------------------------------------------------------------- threads that hang


def test_a_thread_that_was_abandoned_commits_nothing_while_another_one_works(rig, node, passing):
    level = rig()
    level.list()
    hangs, goes_on = threading.Event(), threading.Event()
    hanging = []

    def hang(name):
        if name == "level.store.commit" and not hanging:
            hanging.append(threading.current_thread())
            hangs.set()
            assert goes_on.wait(TIMEOUT_S)

    passing(hang)
    task = WriteLevel(0, 1, key_of(7), (node.capture(Capture(7)),))
    abandoned = TaskControl(task, level.events.append)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(level.run(task, node, abandoned)))
    thread.start()
    assert hangs.wait(TIMEOUT_S)
    abandoned.is_cancelled = True

    assert level.run(ProbeLevel(0, 2)) == TaskEnded(2)
    assert isinstance(level.write(node, Capture(8)), StepStored)
    goes_on.set()
    thread.join(TIMEOUT_S)

    assert isinstance(ended[0], Missed)
    assert level.list() == Listed(9, (key_of(8),), (key_of(7),))
    level.delete(key_of(7))
    assert not level.path(7).exists()


def test_metadata_that_is_damaged_in_memory_fails_and_commits_nothing(rig, node, monkeypatch):
    level = rig()
    place = node.capture(Capture(7))

    def damaged(self):
        raise FormatError("the metadata in a slot does not agree with its checksum")

    monkeypatch.setattr("lazysnap.memory.slots.Slot.read_meta", damaged)
    ended = level.run(WriteLevel(0, 1, key_of(7), (place,)), node)

    assert isinstance(ended, Failed)
    assert files_below(level.root) == []


# ---------------------------------------------------------------- the base of a fine-tuning

FROZEN_BYTES = 2 * BLOCK_BYTES + 5000


def fine_tuned_image(step, version=0):
    layout = Layout.plan([TensorSpec("x", "U8", (ROWS, 4)), TensorSpec("frozen", "U8", (FROZEN_BYTES,))])
    return layout.header + pattern(4 * ROWS, step) + pattern(FROZEN_BYTES, version)


class FineTuningNode(Node):
    """A node with one rank, of whose state one tensor is frozen."""

    def capture(self, capture, *, local_rank=0, is_whole=True):
        image = fine_tuned_image(capture.step)
        keeper_slot = make_slot(1 << 16, len(image))
        self.slots = {local_rank: {keeper_slot.slot_id: keeper_slot}}
        trainer = self._trainers[keeper_slot.slot_id] = TrainerSlot.attach(os.dup(keeper_slot.descriptor))
        meta = replace(capture.meta, tensors={"frozen": {"frozen": True}})
        facts = {"sequence": capture.sequence, "image_bytes": len(image), "meta": meta.to_bytes()}
        trainer.begin(capture.start, capture.step, **facts)
        self.fill(keeper_slot.slot_id, image)
        return local_rank, keeper_slot.slot_id


@pytest.fixture
def fine_tuning():
    with contextlib.closing(FineTuningNode()) as made:
        yield made


def base_at(path):
    return path / NodeName(0, 1).base


def whole_at(path):
    """The bytes of a committed file with its base."""
    storage = open_storage(str(path.parent))
    place = FilePlace(storage, path.name, NodeName(0, 1))
    manifest = verify(place)
    with contextlib.closing(FileBlocks(place, manifest)) as blocks:
        return bytes(blocks.view(0, manifest.size_bytes))


def test_a_base_is_written_once_also_by_a_new_keeper(rig, fine_tuning):
    levels = rig()
    first = levels.write(fine_tuning, Capture(1))
    second = levels.write(fine_tuning, Capture(2))
    after = rig()  # another keeper
    after.list()
    third = after.write(fine_tuning, Capture(3))

    inodes = {base_at(levels.path(step)).stat().st_ino for step in (1, 2, 3)}
    assert len(inodes) == 1
    assert second.written_bytes == third.written_bytes == first.written_bytes - BLOCK_BYTES
    for step in (1, 2, 3):
        assert whole_at(levels.path(step)) == fine_tuned_image(step)


def test_a_new_keeper_reads_the_base_that_it_takes_over_and_replaces_a_damaged_one(rig, fine_tuning):
    rig().write(fine_tuning, Capture(1))
    levels = rig()
    flip(base_at(levels.path(1)))
    levels.list()

    failed = levels.write(fine_tuning, Capture(2))
    assert isinstance(failed, Failed)
    assert "block 1" in failed.text
    assert not levels.path(2).exists()

    stored = levels.write(fine_tuning, Capture(3))
    assert isinstance(stored, StepStored)
    assert stored.written_bytes == len(fine_tuned_image(3))
    assert whole_at(levels.path(3)) == fine_tuned_image(3)


def test_a_base_without_a_manifest_is_deleted_by_the_keeper_that_wrote_it(rig, fine_tuning):
    levels = rig()
    levels.write(fine_tuning, Capture(1))
    (levels.path(1) / MANIFEST).unlink()
    (levels.path(1) / FILE).unlink()
    levels.files[0].begin_write(key_of(1))

    assert levels.list().leftovers == (key_of(1),)
    levels.delete(key_of(1))
    assert not levels.path(1).exists()


def test_a_base_without_a_manifest_that_somebody_copies_stays(rig, fine_tuning):
    levels = rig()
    levels.write(fine_tuning, Capture(1))
    (levels.path(1) / MANIFEST).unlink()
    (levels.path(1) / FILE).unlink()

    after = rig()
    after.delete(key_of(1))
    assert base_at(levels.path(1)).exists()
