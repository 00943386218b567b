"""The file of events: what the keepers of a run write down for its reports."""

import os
import pathlib
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.names import START
from support.waiting import until

from lazysnap import events
from lazysnap.config import PersistentLevel
from lazysnap.keeper.event_log import MAX_BYTES, EventFileWriter, thinned
from lazysnap.levels import open_store
from lazysnap.shard.names import events_file_name, new_id, parse_events_file_name

RUN = "ab" * 8


def found(level):
    """The events at a level, once it has any."""
    return [event for file in events.read(level["url"]) for event in file.events]


def kinds(level):
    return [type(event) for event in found(level)]


def ends(level):
    return [event for event in found(level) if isinstance(event, events.TrainerEnded)]


@pytest.mark.slow
def test_starts_steps_and_ends_of_a_run_are_in_one_file(job):
    level, starts = job.level(), [new_id(), new_id()]
    first = job.trainer(levels=[level], start=starts[0])
    for step in (1, 2, 3):
        first.capture(step=step, must=step == 3)
    until(lambda: events.Stored in kinds(level))
    first.kill()
    until(lambda: len(ends(level)) == 1)
    second = job.trainer(levels=[level], start=starts[1])
    second.capture(step=4, must=True)
    until(lambda: [event.step for event in found(level) if isinstance(event, events.Stored)][-1:] == [4])
    second.goodbye()
    until(lambda: len(ends(level)) == 2)

    [file] = events.read(level["url"])
    assert (file.run_id, file.node) == (RUN, 0)
    assert [event.t for event in file.events] == sorted(event.t for event in file.events)
    begun = [event for event in file.events if isinstance(event, events.TrainerStarted)]
    assert [(event.start, event.pid) for event in begun] == [
        (start, trainer.process.pid) for start, trainer in zip(starts, (first, second), strict=True)
    ]
    assert all(0 < event.t - event.began < 60 for event in begun)
    died, over = ends(level)
    assert (died.how, died.step, died.start, died.pid) == ("died", 3, starts[0], first.process.pid)
    assert (over.how, over.step, over.start) == ("goodbye", 4, starts[1])
    passed = [event for event in file.events if isinstance(event, events.Progress)]
    assert passed[-1].step == passed[-1].captured == 4
    assert all(0 < event.taken <= event.t for event in passed if event.captured > 0)
    assert {event.level for event in file.events if isinstance(event, events.Stored)} == {level["url"]}
    assert [step for event in file.events if isinstance(event, events.Complete) for step in event.steps][-1] == 4


@pytest.mark.slow
def test_the_next_keeper_goes_on_with_the_file(job):
    level = job.level()
    trainer = job.trainer(levels=[level])
    trainer.capture(step=1, must=True)
    until(lambda: events.Stored in kinds(level))

    first = job.keeper_pid()
    os.kill(first, signal.SIGKILL)
    until(lambda: job.keeper_pid() not in (None, first))
    until(lambda: trainer.reserve(count=3) == 3)
    assert trainer.capture(step=2, must=True) is True
    until(lambda: max((event.step for event in found(level) if isinstance(event, events.Stored)), default=0) == 2)

    assert kinds(level).count(events.KeeperStarted) == 2
    assert kinds(level).count(events.TrainerStarted) == 1
    assert not ends(level)


def test_a_run_that_stores_nothing_leaves_no_file(job):
    level = job.level(every_n_steps=1000)
    trainer = job.trainer(levels=[level])
    trainer.goodbye()
    until(job.is_gone)

    assert not pathlib.Path(level["url"]).exists()


def test_no_file_is_written_where_events_are_off(job):
    level = job.level()
    trainer = job.trainer(levels=[level], environment={"LAZYSNAP_EVENTS": "0"})
    trainer.capture(step=1, must=True)
    trainer.goodbye()
    until(job.is_gone)

    assert [path.name[:5] for path in pathlib.Path(level["url"]).iterdir()] == ["step-"]


def test_a_failing_level_is_named_with_the_reason(job):
    first, second = job.level("first"), job.level("second")
    pathlib.Path(second["url"]).write_text("in the way")
    trainer = job.trainer(levels=[first, second])
    trainer.capture(step=1, must=True)

    until(lambda: events.LevelFailed in kinds(first))
    [failed, *_] = [event for event in found(first) if isinstance(event, events.LevelFailed)]
    assert (failed.level, failed.step) == (second["url"], 1)
    assert second["url"] in failed.text


def test_what_is_no_event_is_left_out(tmp_path):
    good = events.Notice(t=2.0)
    lines = [
        b"no JSON",
        b'{"event":"of a later version","t":1}',
        b'{"event":"notice"}',
        b"[" * 10_000,
        events.encode(good) * 2,
        b'{"event":"notice","t":1,"more":1}',
        events.encode(good)[:-5],
    ]
    (tmp_path / events_file_name(RUN, 3)).write_bytes(b"\n".join(lines))
    (tmp_path / "events-by-others.jsonl").write_bytes(events.encode(good))

    assert events.read(str(tmp_path)) == [events.EventFile(RUN, 3, (events.Notice(t=1.0), good, good))]


@pytest.mark.parametrize("kind", events.Event.__subclasses__())
def test_every_kind_has_its_documented_name(kind):
    page = pathlib.Path(__file__).parents[2] / "docs" / "events.md"
    assert f"| `{kind.__struct_config__.tag}` |" in page.read_text()


def test_a_name_of_a_file_is_read_as_it_is_written():
    assert parse_events_file_name(events_file_name(RUN, 12)) == (RUN, 12)
    for name in (
        f"events-{RUN}-node-12.jsonl",
        f"events-{RUN}-node-000012.jsonl",
        f"events-{RUN[1:]}-node-00012.jsonl",
    ):
        assert parse_events_file_name(name) is None


# ---------------------------------------------------------------- thinning


def progress(t, rank):
    times = {"waited_s": 0.0, "taken": 0.0, "copy_s": 0.0}
    return events.Progress(t=t, rank=rank, start=START, step=t, every=1, captured=t, **times)


@given(st.lists(st.sampled_from([0, 1, None]), min_size=8, max_size=200))
def test_thinning_keeps_what_is_rare_and_what_came_right_before_it(which):
    found = [events.Notice(t=t) if rank is None else progress(t, rank) for t, rank in enumerate(which)]
    kept = thinned(found)

    assert len(kept) < len(found)
    assert kept == [event for event in found if event in kept]
    border = len(found) * 3 // 4
    assert kept[-(len(found) - border) :] == found[border:]
    if kept[0] == found[0]:  # else all of the oldest went
        rare = [number for number in range(border) if isinstance(found[number], events.Notice)]
        assert all(found[number] in kept for number in rare)
        assert all(found[number - 1] in kept for number in rare if number)


def test_thinning_takes_of_each_rank_alike():
    found = [progress(t, t % 2) for t in range(4000)]
    while sum(len(events.encode(event)) for event in found) > MAX_BYTES // 4:
        found = thinned(found)

    counts = [sum(event.rank == rank for event in found) for rank in (0, 1)]
    assert abs(counts[0] - counts[1]) <= 8


def test_a_file_that_grew_too_long_is_thinned_out(job):
    level = job.level()
    path = pathlib.Path(level["url"]) / events_file_name(RUN, 0)
    path.parent.mkdir()
    path.write_bytes(b"".join(events.encode(progress(t, 0)) for t in range(20_000)))
    assert path.stat().st_size > 2 * MAX_BYTES
    trainer = job.trainer(levels=[level])
    trainer.capture(step=1, must=True)
    trainer.goodbye()  # its end is written at once; a long file waits for what is less rare

    until(lambda: events.Stored in kinds(level))
    assert path.stat().st_size <= MAX_BYTES
    assert found(level)[0] == progress(0, 0)


def test_one_event_that_is_longer_than_the_file_may_be_is_written_all_the_same(tmp_path):
    writer = EventFileWriter(PersistentLevel(str(tmp_path)), RUN, 0)
    writer.add(events.Stored(t=1.0, level="a", step=1, bytes=1, seconds=1.0, checksum_s=0.1, read_back_s=0.1))
    writer.add(events.Alert(t=2.0, about="keeper", text="x" * 2 * MAX_BYTES))
    writer.close(60.0)

    assert (tmp_path / events_file_name(RUN, 0)).stat().st_size > MAX_BYTES


def test_a_level_that_fails_for_days_does_not_fill_the_keepers_memory(tmp_path):
    """The file in the way is where the level's directory would be."""
    (tmp_path / "level").write_text("")
    writer = EventFileWriter(PersistentLevel(str(tmp_path / "level")), RUN, 0)
    for t in range(50_000):
        writer.add(progress(t, 0))
    writer.close(60.0)

    assert len(writer._events) < 10_000
    assert writer._events[-1] == progress(49_999, 0)


def test_a_sweep_takes_what_a_killed_keeper_left_of_it(tmp_path):
    store = open_store(str(tmp_path))
    left, other = (
        tmp_path / f".{name}.tmp-1-0123abcd" for name in (events_file_name(RUN, 0), "events-by-others.jsonl")
    )
    for path in (left, other):
        path.write_text("")

    assert store.sweep() == [left.name]
    assert other.exists()


@pytest.mark.slow
def test_at_a_url_the_file_is_written_every_five_minutes_at_most_and_at_the_end(tmp_path):
    levels = [PersistentLevel(f"memory://{tmp_path.name}/run"), PersistentLevel(str(tmp_path / "run"))]
    (tmp_path / "run").mkdir()
    url, path = ({"url": level.url} for level in levels)
    writers = [EventFileWriter(level, RUN, 0) for level in levels]
    for writer in writers:
        writer.add(events.Stored(t=1.0, level="x", step=1, bytes=1, seconds=1.0, checksum_s=0.5, read_back_s=0.0))
    until(lambda: kinds(url) == kinds(path) == [events.Stored])

    for writer in writers:
        writer.add(events.Alert(t=2.0, about="keeper", text="an error"))

    until(lambda: kinds(path) == [events.Stored, events.Alert])
    assert kinds(url) == [events.Stored]
    for writer in writers:
        writer.close(60)
    assert kinds(url) == [events.Stored, events.Alert]
