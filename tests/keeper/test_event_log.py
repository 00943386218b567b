"""The file of events: what the keepers of a run write down for its reports."""

import os
import pathlib
import signal

import pytest
from support.names import START
from support.waiting import until

from lazysnap import events
from lazysnap.config import PersistentLevel
from lazysnap.keeper.event_file import EventFileWriter
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
    assert len({event.start for event in found(level) if isinstance(event, events.TrainerStarted)}) == 1
    assert not ends(level)


@pytest.mark.slow
def test_a_run_that_stores_nothing_leaves_no_file(job):
    level = job.level(every_n_steps=1000)
    trainer = job.trainer(levels=[level])
    trainer.goodbye()
    until(job.is_gone)

    assert not pathlib.Path(level["url"]).exists()


@pytest.mark.slow
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


@pytest.mark.parametrize("kind", events.FILED)
def test_every_kind_has_its_documented_name(kind):
    page = pathlib.Path(__file__).parents[2] / "docs" / "events.md"
    assert f"| `{kind.__struct_config__.tag}` |" in page.read_text()


def test_values_out_of_any_reason_are_no_events(tmp_path):
    """A report that computed with them would fail, or fill memory."""
    good = events.encode(progress(5, 0)).decode()
    bad = [good.replace('"t":5', f'"t":{value}') for value in ("1e300", "-1.0", "1e12")] + [
        good.replace('"step":5', f'"step":{value}') for value in ("-9", "1e99", str(1 << 70), '"5"')
    ]
    (tmp_path / events_file_name(RUN, 0)).write_text("".join([*bad, good, good.replace(START, "x" * 70_000)]))

    assert found({"url": str(tmp_path)}) == [progress(5, 0)]


def test_the_older_file_is_read_too(tmp_path):
    (tmp_path / events_file_name(RUN, 0, is_older=True)).write_bytes(events.encode(progress(1, 0)))
    (tmp_path / events_file_name(RUN, 0)).write_bytes(events.encode(progress(2, 0)))

    assert events.read(str(tmp_path)) == [events.EventFile(RUN, 0, (progress(1, 0), progress(2, 0)))]


def test_a_name_of_a_file_is_read_as_it_is_written():
    assert parse_events_file_name(events_file_name(RUN, 12)) == (RUN, 12)
    assert parse_events_file_name(events_file_name(RUN, 12, is_older=True)) == (RUN, 12)
    for name in (
        f"events-{RUN}-node-12.jsonl",
        f"events-{RUN}-node-000012.jsonl",
        f"events-{RUN[1:]}-node-00012.jsonl",
        f"events-{RUN}-node-00012.oldest.jsonl",
    ):
        assert parse_events_file_name(name) is None


# ---------------------------------------------------------------- the file


def progress(t, rank):
    times = {"waited_s": 0.0, "taken": 0.0, "copy_s": 0.0}
    return events.Progress(t=float(t), rank=rank, start=START, step=t, every=1, captured=t, **times)


def stored(step):
    times = {"seconds": 1.0, "checksum_s": 0.1, "read_back_s": 0.1}
    return events.Stored(t=float(step), level="a", step=step, bytes=1, **times)


def written(path):
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def write(tmp_path):
    """Opens the file of a run at a URL, by default in an empty directory, and closes it at the end."""
    opened = []

    def begin(url=None, node=0):
        opened.append(EventFileWriter(PersistentLevel(url or str(tmp_path)), RUN, node))
        return opened[-1]

    yield begin
    for writer in opened:
        writer.close(60.0)


@pytest.mark.slow
def test_lines_are_appended_and_those_before_them_stay_as_they_are(tmp_path, write):
    path = tmp_path / events_file_name(RUN, 0)
    writer = write()
    writer.add(stored(1))
    until(lambda: written(path))
    first, number = written(path), path.stat().st_ino

    writer.add(stored(2))
    until(lambda: len(written(path)) > len(first))

    assert written(path) == first + events.encode(stored(2))
    assert path.stat().st_ino == number


@pytest.mark.slow
def test_after_a_line_that_a_killed_keeper_did_not_end_the_next_one_is_whole(tmp_path, write):
    path = tmp_path / events_file_name(RUN, 0)
    path.write_bytes(events.encode(stored(1)) + events.encode(stored(2))[:-20])

    write().add(stored(3))

    until(lambda: found({"url": str(tmp_path)}) == [stored(1), stored(3)])


@pytest.mark.slow
def test_a_file_that_grew_too_long_becomes_the_older_one_and_the_next_one_says_who_trains(tmp_path, write):
    path = tmp_path / events_file_name(RUN, 0)
    older = tmp_path / events_file_name(RUN, 0, is_older=True)
    started = events.TrainerStarted(
        t=1.0, rank=0, pid=1, start=START, step=0, world_size=1, every_n_steps=1, began=1.0, source="memory"
    )
    writer = write()
    for event in (started, stored(1), progress(7, 0)):
        writer.add(event)
    until(lambda: written(path).count(b"\n") == 3)
    with path.open("ab") as file:
        while file.tell() < events.MAX_FILE_BYTES:
            file.write(events.encode(progress(8, 0)) * 1000)
    grown = written(path)

    writer.add(progress(9, 0))
    until(lambda: older.exists() and written(path).endswith(events.encode(progress(9, 0))))

    assert written(older) == grown
    [restated, last] = events.decode(written(path))
    assert (restated.start, restated.step, restated.began, restated.source) == (START, 7, restated.t, None)
    assert last == progress(9, 0)


def test_a_level_that_fails_for_days_does_not_fill_the_keepers_memory(tmp_path, write):
    """The file in the way is where the level's directory would be; it goes away after 50,000 events."""
    level = tmp_path / "level"
    level.write_text("")
    writer = write(str(level))
    writer.add(stored(1))
    for t in range(50_000):
        writer.add(progress(t, 0))
    ended = events.TrainerEnded(t=1e6, rank=0, pid=1, start=START, step=50_000, how="died")
    writer.add(ended)
    level.unlink()
    level.mkdir()
    writer.close(60.0)

    lines = found({"url": str(level)})
    assert len(lines) < 10_000
    assert lines[-1] == ended


# ---------------------------------------------------------------- a first level at a URL


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A URL, and a runtime directory of the test's own."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", str(tmp_path / "runtime"))
    return f"memory://{tmp_path.name}/run"


@pytest.mark.slow
def test_at_a_url_the_file_is_copied_every_five_minutes_at_most_and_at_the_end(tmp_path, place, write):
    here = tmp_path / "runtime" / events_file_name(RUN, 0)
    writer = write(place)
    writer.add(stored(1))
    until(lambda: found({"url": place}) == [stored(1)])

    writer.add(stored(2))
    until(lambda: written(here) == events.encode(stored(1)) + events.encode(stored(2)))
    assert found({"url": place}) == [stored(1)]

    writer.close(60.0)
    assert found({"url": place}) == [stored(1), stored(2)]
    assert not here.exists()


def test_what_a_killed_keeper_did_not_copy_the_next_one_of_the_node_does(tmp_path, place, write):
    (tmp_path / "runtime" / events_file_name(RUN, 0)).write_bytes(events.encode(stored(1)) + b'{"event":"no')

    writer = write(place)
    writer.add(stored(2))
    writer.close(60.0)

    assert found({"url": place}) == [stored(1), stored(2)]


def test_a_keeper_on_another_machine_goes_on_with_the_copy_of_the_level(tmp_path, place, write, monkeypatch):
    writer = write(place)
    writer.add(stored(1))
    writer.close(60.0)
    (tmp_path / "other").mkdir(mode=0o700)
    monkeypatch.setenv("LAZYSNAP_RUNTIME_DIR", str(tmp_path / "other"))

    writer = write(place)
    writer.add(stored(2))
    writer.close(60.0)

    assert found({"url": place}) == [stored(1), stored(2)]
