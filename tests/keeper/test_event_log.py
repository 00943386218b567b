"""The file of events: what the keepers of a run write down for its reports."""

import pathlib

import pytest
from msgspec.structs import replace
from support.fed_keeper import IMAGE_BYTES, FedKeeper, trainer_state
from support.names import START
from support.waiting import until

from lazysnap import events
from lazysnap.core.messages import Farewell, JobSettings, KeeperAlert, LevelSettings
from lazysnap.keeper.event_file import EventFileWriter
from lazysnap.shard.names import events_file_name, parse_events_file_name

RUN = "ab" * 8
FIRST = 0x5000
SECOND = 0x6000
OTHER_PID = 1
"""A process that is another trainer than this one."""


def found(level):
    """The events at a level, once it has any."""
    return [event for file in events.read(level["url"]) for event in file.events]


def of_kind(noted, kind):
    return [event for event in noted if isinstance(event, kind)]


@pytest.fixture
def keeper():
    fed = FedKeeper()
    yield fed
    fed.close()


@pytest.fixture
def job(tmp_path):
    return JobSettings(RUN, (LevelSettings(str(tmp_path / "level"), every_n_steps=1),), ranks=(4,), world_size=8)


@pytest.fixture
def noted(keeper, tmp_path):
    """Returns what the keeper noted, which ends then."""
    (tmp_path / "level").mkdir()

    def events_at_end():
        keeper.log.close()
        return found({"url": str(tmp_path / "level")})

    return events_at_end


def test_starts_steps_and_ends_of_a_run_are_in_one_file(keeper, job, noted):
    first = trainer_state(job, FIRST)
    keeper.report(replace(first, start=0, job=None))  # it restores
    keeper.report(first)
    for step in (1, 2, 3):
        keeper.capture(first, step)
    keeper.die()
    second = replace(trainer_state(job, SECOND, step=3), source="memory")
    keeper.report(second, OTHER_PID)
    for step in (4, 5):  # a grant lies two steps ahead
        keeper.capture(second, step)
    keeper.report(replace(second, farewell=Farewell.OVER), OTHER_PID)

    lines = noted()

    assert [event.t for event in lines] == sorted(event.t for event in lines)
    assert len(of_kind(lines, events.KeeperStarted)) == 1
    begun = of_kind(lines, events.TrainerStarted)
    assert [(one.start, one.step, one.source) for one in begun] == [
        (f"{FIRST:016x}", 0, None),
        (f"{SECOND:016x}", 3, "memory"),
    ]
    assert {(one.rank, one.world_size, one.every_n_steps) for one in begun} == {(4, 8, 1)}
    assert all(0 < one.began <= one.t for one in begun)
    died, over = of_kind(lines, events.TrainerEnded)
    assert (died.how, died.step, died.start) == ("died", 3, f"{FIRST:016x}")
    assert (over.how, over.step, over.start) == ("goodbye", 5, f"{SECOND:016x}")
    passed = of_kind(lines, events.Progress)
    assert passed[0].step == passed[0].captured == 1
    assert passed[-1].step == passed[-1].captured == 5
    assert all(0 < one.taken <= one.t and one.copy_s == 0.001 and one.waited_s == 0.25 for one in passed)
    stored = of_kind(lines, events.Stored)
    assert [one.step for one in stored] == [1, 2, 3, 5]
    assert {(one.bytes, one.seconds) for one in stored} == {(IMAGE_BYTES, 0.5)}
    complete = of_kind(lines, events.Complete)
    assert [one.steps for one in complete] == [[1], [2], [3], [5]]


def test_the_step_that_a_trainer_died_in_is_its_last(keeper, job, noted):
    state = trainer_state(job, FIRST)
    keeper.report(state)
    keeper.capture(state, 1)
    keeper.capture(state, 2, is_whole=False)
    keeper.die()

    [ended] = of_kind(noted(), events.TrainerEnded)

    assert ended.step == 2


def test_what_becomes_complete_after_the_last_trainer_is_noted(keeper, job, noted):
    state = trainer_state(job, FIRST)
    keeper.report(state)
    keeper.is_writing_held = True
    keeper.capture(state, 1)
    keeper.die()
    keeper.is_writing_held = False
    keeper.finish(keeper.held_writes[0])

    assert [one.steps for one in of_kind(noted(), events.Complete)] == [[1]]


def test_a_run_that_stores_nothing_leaves_no_file(keeper, tmp_path):
    level = LevelSettings(str(tmp_path / "level"), every_n_steps=1000)
    state = trainer_state(JobSettings(RUN, (level,)), FIRST)
    keeper.report(state)
    keeper.is_writing_held = True
    keeper.capture(state, 1)
    keeper.report(replace(state, farewell=Farewell.OVER))
    keeper.log.close()

    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_failing_level_is_named_once_with_the_reason(keeper, job, noted):
    second = LevelSettings("/second", every_n_steps=1, storage_options={"secret": "hunter2hunter2"})
    state = trainer_state(replace(job, levels=(*job.levels, second)), FIRST)
    keeper.failing[1] = "no access to /second with hunter2hunter2"
    keeper.report(state)
    for step in (1, 2):
        keeper.capture(state, step)

    [failed] = of_kind(noted(), events.LevelFailed)

    assert (failed.level, failed.step, failed.text) == ("/second", -1, "no access to /second with ***")


def test_a_step_that_a_level_did_not_take_is_named(keeper, job, noted):
    second = LevelSettings("/second", every_n_steps=1)
    state = trainer_state(replace(job, levels=(*job.levels, second)), FIRST)
    keeper.report(state)
    keeper.failing[1] = "disk full"
    keeper.capture(state, 1)

    [failed, *_] = of_kind(noted(), events.LevelFailed)

    assert (failed.step, failed.text) == (1, "disk full")


def test_trouble_is_noted_when_it_begins_and_when_it_is_over(keeper, job, noted):
    state = trainer_state(job, FIRST)
    keeper.report(state)
    keeper.capture(state, 1)
    trouble = KeeperAlert("links", "no link to the keeper of node 1")
    for alerts, is_preempted in (((trouble,), False), ((trouble,), True), ((), True)):
        keeper.log.note_state(replace(keeper.core.common_state(), alerts=alerts, is_preempted=is_preempted))

    lines = noted()

    assert [(one.about, one.text) for one in of_kind(lines, events.Alert)] == [("links", trouble.text), ("links", "")]
    assert len(of_kind(lines, events.Preempted)) == 1


def test_a_keeper_that_takes_over_does_not_note_what_earlier_starts_stored(keeper, job, noted):
    state = trainer_state(job, FIRST)
    keeper.listed = ((FIRST - 1, 7), (FIRST, 8))
    keeper.report(replace(state, step=8))
    keeper.capture(state, 9)

    complete = of_kind(noted(), events.Complete)

    assert [one.steps for one in complete] == [[8], [9]]


def test_an_error_in_the_notes_is_logged_and_what_follows_is_noted(keeper, job, noted, caplog):
    keeper.log.note(None, None)
    assert [record.exc_info[0] for record in caplog.records] == [AttributeError]

    state = trainer_state(job, FIRST)
    keeper.report(state)
    keeper.capture(state, 1)
    assert len(of_kind(noted(), events.TrainerStarted)) == 1


def test_what_is_no_event_is_left_out(tmp_path):
    good = events.Preempted(t=2.0)
    lines = [
        b"no JSON",
        b'{"event":"of a later version","t":1}',
        b'{"event":"preempted"}',
        b"[" * 10_000,
        events.encode(good) * 2,
        b'{"event":"preempted","t":1,"more":1}',
        events.encode(good)[:-5],
    ]
    (tmp_path / events_file_name(RUN, 3)).write_bytes(b"\n".join(lines))
    (tmp_path / "events-by-others.jsonl").write_bytes(events.encode(good))

    assert events.read(str(tmp_path)) == [events.EventFile(RUN, 3, (events.Preempted(t=1.0), good, good))]


@pytest.mark.parametrize("kind", events.FILED)
def test_every_kind_has_its_documented_name(kind):
    page = pathlib.Path(__file__).parents[2] / "docs" / "format.md"
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
    return events.Progress(t=float(t), rank=rank, start=START, step=t, captured=t, **times)


def stored(step):
    return events.Stored(t=float(step), level="a", step=step, bytes=1, seconds=1.0)


def written(path):
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def write(tmp_path):
    """Opens the file of a run at a URL, by default in an empty directory, and closes it at the end."""
    opened = []

    def begin(url=None, node=0):
        opened.append(EventFileWriter(LevelSettings(url or str(tmp_path)), RUN, node))
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
        t=1.0, rank=0, start=START, step=0, world_size=1, every_n_steps=1, began=1.0, source="memory"
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
    ended = events.TrainerEnded(t=1e6, rank=0, start=START, step=50_000, how="died")
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
